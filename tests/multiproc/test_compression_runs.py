"""Runs whose plan says ``compress``: counted bytes are the predicted ones, ZeRO changes no bit, a resume has every bit."""

import copy
from dataclasses import asdict
from functools import partial

import pytest

from multiproc.test_island_runs import cut_back
from shoal.comm.mesh import build_mesh
from shoal.comm.torchgroup import TorchTransport
from shoal.core.plan import Plan
from shoal.engine import parallelize
from shoal.engine.sizes import RankPreview, measure_state
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.verify.observation import TrafficObserver
from support.processes.command import read_summary

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 48, "sequence": 8, "vocab": 97},
    "train": {"steps": 3, "global_batch": 8},
    "compression": {"min_elements": 256},
}
SETTINGS = ("--set", "train.steps=9", "--set", "train.global_batch=12", "--set", "checkpoint.every=5")
SETTINGS += ("--set", "compression.min_elements=256")


def train_counted(world, plans, is_shared=True):
    """By plan: the hash of the weights, and the steps whose counted traffic was not what was predicted."""
    found = {}
    # As between hosts, where there is no memory to share.
    parallelize.build_mesh = partial(build_mesh, shared=is_shared)
    for text, more in plans.items():
        recipe = Recipe.model_validate({**RECIPE, **more})
        model, loss, data = build_parts(recipe)
        plain = copy.deepcopy(model)
        settings = {
            "loss": loss,
            "train": recipe.train,
            "optim": recipe.optim,
            "compression": recipe.compression,
            "plan": Plan.parse(text.partition(" #")[0]),
            "world": world,
        }
        trainer = Trainer(model, data, **settings)
        assert is_shared != isinstance(trainer.mesh.replicas.transport, TorchTransport)
        observer, wrong, steps = TrafficObserver(trainer, plain, loss, data), [], trainer.training_steps()
        for _ in range(3):
            with trainer.mesh.traffic.counting() as counts:
                next(steps)
            # Traffic that is expected to be nothing is not counted at all.
            expected = {key: one for key, one in observer.expected(counts).items() if one.calls}
            if counts != expected:
                wrong.append(f"{counts} is not {expected}")
        steps.close()
        preview = RankPreview.build(
            plain,
            analysis=trainer.engine.analysis,
            plan=trainer.plan,
            rank=world.rank,
            precision=trainer.engine.precision,
            part=None if trainer.engine.pipeline is None else trainer.engine.pipeline.part,
        )
        measured = measure_state(trainer.engine)
        predicted = asdict(preview.state_bytes(recipe.optim, recipe.compression))
        wrong += [
            f"{what}: {size} bytes are not {predicted[what]}"
            for what, size in measured.items()
            if size != predicted[what]
        ]
        assert "compression" in measured or trainer.plan.compress is None
        found[text] = [trainer.engine.hash_weights(), *wrong]
        # Not the trainer, which would close the world.
        trainer.engine.close()
        trainer.reporter.close()
    return found


ONE_WAY = {"compression": {"min_elements": 256, "both_ways": False}}
METHODS = (
    "int8",
    "int4",
    "fp16",
    "sign",
    "natural",
    "qsgd:4",
    "topk:0.05",
    "threshold:0.001",
    "randk:0.1",
    "powersgd:2@1",
)
"""Each under ZeRO too, where the sum stays with its owner."""


def same_under_zero(methods):
    return {f"dp=2 zero={zero} compress={method}": ONE_WAY for method in methods for zero in (0, 1, 2, 3)}


def refuse_differences(found):
    by_method = {}
    for text, (digest, *wrong) in found.items():
        assert not wrong, f"{text}: {wrong}"
        by_method.setdefault(text.partition("compress=")[2], {})[text] = digest
    for plans in by_method.values():
        assert len(set(plans.values())) == 1, plans


def test_counted_bytes_are_the_predicted_ones_and_zero_changes_no_bit():
    plans = same_under_zero(("int4", "topk:0.05"))
    plans |= {"dp=2 microbatches=2 compress=int8 #": {}, "dp=2 zero=2 microbatches=2 compress=powersgd:2@1 #": {}}
    found = run_on_ranks(train_counted, 2, plans)
    assert found[0] == found[1]
    refuse_differences(found[0])


@pytest.mark.soak
def test_weights_are_gathered_as_codes_and_neither_stage_nor_ranks_change_a_bit():
    rows = {"compression": {"min_elements": 256, "weights": "int8"}}
    found = run_on_ranks(train_counted, 2, {f"dp=2 zero={zero} compress=int4": rows for zero in (1, 2, 3)})
    refuse_differences(found[0])
    plain = run_on_ranks(train_counted, 2, {"dp=2 zero=3 compress=int4": {}, "dp=2 zero=1": rows, "dp=2 zero=3": rows})[
        0
    ]
    assert plain["dp=2 zero=3 compress=int4"][0] != found[0]["dp=2 zero=3 compress=int4"][0]
    assert [plain["dp=2 zero=1"], plain["dp=2 zero=3"]] == [plain["dp=2 zero=1"][:1]] * 2


@pytest.mark.soak
def test_every_method_counts_what_is_predicted_and_zero_changes_no_bit():
    found = run_on_ranks(train_counted, 2, same_under_zero(METHODS), deadline_seconds=400)
    refuse_differences(found[0])
    assert found[0] == found[1]
    clipped = {"optim": {"name": "sgd", "clip": 0.1, "lr": 0.1}, "compression": {"min_elements": 256, "warmup": 2}}
    refuse_differences(run_on_ranks(train_counted, 2, {"dp=2 compress=onebit@1": {}, "dp=2 compress=onebit@2": {}})[0])
    momentum = {f"dp=2 zero={zero} compress=dgc:0.05": clipped for zero in (0, 1, 3)}
    refuse_differences(run_on_ranks(train_counted, 2, momentum, deadline_seconds=200)[0])


@pytest.mark.soak
def test_pipelines_have_the_bits_of_replicas_alone():
    plans = {
        "dp=2 pp=2 microbatches=2 compress=int4": ONE_WAY,
        "dp=2 pp=2 microbatches=2 zero=1 compress=int4": ONE_WAY,
        "dp=2 pp=2 microbatches=2 zero=3 compress=int4": ONE_WAY,
        "dp=4 compress=int8 #": {},
        "dp=4 zero=2 compress=threshold:0.001 #": {},
    }
    found = run_on_ranks(train_counted, 4, plans, deadline_seconds=300)
    refuse_differences(found[0])
    alone = run_on_ranks(train_counted, 2, {"dp=2 microbatches=2 compress=int4": ONE_WAY}, deadline_seconds=120)
    assert alone[0]["dp=2 microbatches=2 compress=int4"][0] == found[0]["dp=2 pp=2 microbatches=2 compress=int4"][0]


@pytest.mark.soak
@pytest.mark.parametrize("size", [3, 4])
def test_gloo_has_the_bits_of_shared_memory_between_more_than_two_ranks(size):
    """gloo adds in an order of its own, so sums go in slices there, and what is counted differs."""
    train = {"train": {"steps": 3, "global_batch": 24}}
    plans = {f"dp={size} compress={method}": train for method in (*METHODS, "bf16", "fp8", "qsgd:2", "onebit@1")}
    plans |= {f"dp={size} compress={method} #": {**train, **ONE_WAY} for method in ("int4", "sign")}
    plans |= {f"dp={size} zero={zero} compress=int4": train for zero in (1, 2, 3)}
    plans |= {f"dp={size} zero=1 compress=powersgd:2@1": train, f"dp={size} microbatches=2 compress=int4": train}
    sgd = {**train, "optim": {"name": "sgd", "clip": 0.1, "lr": 0.1}}
    plans[f"dp={size} compress=dgc:0.05"] = sgd
    over_gloo = run_on_ranks(train_counted, size, plans, False, deadline_seconds=600)
    shared = run_on_ranks(train_counted, size, plans, deadline_seconds=600)
    assert all(len(row) == 1 for rank in (*over_gloo, *shared) for row in rank.values()), (over_gloo, shared)
    assert over_gloo == shared


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 compress=int4",
        pytest.param("dp=2 zero=2 compress=topk:0.05@3", marks=pytest.mark.soak),
        pytest.param("dp=2 compress=powersgd:2", marks=pytest.mark.soak),
        pytest.param("dp=3 compress=sign@2", marks=pytest.mark.soak),
        pytest.param("dp=2 compress=onebit@3", marks=pytest.mark.soak),
        pytest.param("dp=2 pp=2 compress=int4", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_goes_on_ends_in_the_same_weights(shoal, tiny, tmp_path, plan):
    run = tmp_path / "run"
    shoal.run("train", tiny, "--plan", plan, "--run-dir", run, *SETTINGS)
    whole = read_summary(run)["weights_sha256"]
    cut_back(run, 5)
    done = shoal.run("train", tiny, "--plan", plan, "--run-dir", run, "--resume", *SETTINGS)
    assert "going on from step 5" in done.stderr and "sum" not in done.stderr and "dropped" not in done.stderr
    assert read_summary(run)["weights_sha256"] == whole


@pytest.mark.soak
def test_a_checkpoint_moves_between_numbers_of_replicas_and_codecs_and_says_so(shoal, tiny, tmp_path):
    run = tmp_path / "run"

    def go_on(plan, steps):
        more = (
            "--set",
            f"train.steps={steps}",
            "--set",
            "train.global_batch=12",
            "--set",
            "compression.min_elements=256",
        )
        return shoal.run("train", tiny, "--plan", plan, "--run-dir", run, "--resume=auto", *more).stderr

    go_on("dp=2 compress=int4", 3)
    assert "residuals are of 2 replicas, here are 3" in go_on("dp=3 compress=int4", 5)
    assert "is of compress=int4, and this plan has compress=topk:0.1" in go_on("dp=2 compress=topk:0.1", 7)
    assert "compresses nothing: what was not sent yet is dropped" in go_on("dp=2", 9)
    assert "dropped" not in go_on("dp=2 compress=sign", 10)
