"""Stages of several ranks through the real trainer: proved bit for bit, resumed, from a file, and a bug in them caught."""

from itertools import pairwise

import pytest

from shoal.checkpoint.reader import read
from shoal.comm.trafficcounter import traffic_rows
from shoal.core.config import validate
from shoal.core.plan import Plan
from shoal.engine.resolve import resolve_plan
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.csv_file import write_csv
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.config import Recipe
from shoal.tuning.rehearsal import build_subject as build_rehearsed
from shoal.tuning.rehearsal import trace_rank
from shoal.verify.mutants.catalogue import MUTANTS
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from shoal.verify.session import try_mutant
from support.pipeline.trainer_runs import recipe_of, train_alone, train_on_ranks
from support.training.rehearsals import rehearse_ranks

PLAN, ALONE = "pp=3 replicas=2-1 microbatches=4", "dp=1 microbatches=4"
MUTANT = "ranks of a replicated stage not summed"
# Ten samples to train on: the second batch of an epoch has 2, fewer than there are microbatches.
SHORT = {"data": {"samples": 11, "validation": 0.1, "test": 0.0}, "train": {"epochs": 2}}


def job(plan, steps, folder, name, *, resume=False):
    settings = {"train": {"steps": steps, "watch_every": 0}, "optim": {"schedule": "constant"}}
    return {"kind": "gpt", "plan": plan, "settings": settings, "run_dir": str(folder / name), "resume": resume}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(folder):
    path = folder / "own.csv"
    path.write_text(write_csv(make_schedule("1f1b", ranks=3, microbatches=4, replicas=(2, 1))))
    train_alone(job(ALONE, 3, folder, "from one process"))
    jobs = {
        "stopped": job(PLAN, 3, folder, "stopped"),
        "resumed": job(PLAN, 7, folder, "stopped", resume=True),
        "left alone": job(PLAN, 7, folder, "left alone"),
        "a file": job(f"pp=3 schedule={path} microbatches=4", 7, folder, "a file"),
        "from one process": job(PLAN, 7, folder, "from one process", resume=True),
        "other ranks": job("pp=3 replicas=1-2 microbatches=4", 7, folder, "other ranks"),
        "to one process": job(PLAN, 3, folder, "to one process"),
        "a short last batch": {"kind": "gpt", "settings": SHORT, "plan": PLAN},
    }
    ranks = run_on_ranks(train_on_ranks, 3, jobs, deadline_seconds=110.0)
    for one, other in pairwise(ranks):
        assert one == other, "ranks disagree"
    return ranks[0]


@pytest.mark.soak
def test_a_run_that_was_stopped_ends_as_one_that_was_not(found):
    resumed, alone = found["resumed"], found["left alone"]
    assert resumed["step"] == alone["step"] == 7 and resumed["losses"] == alone["losses"][3:]
    assert resumed["sha"] == alone["sha"]


def test_a_file_of_turns_is_the_plan_of_turns(found):
    assert found["a file"] == found["left alone"]


def test_another_stage_with_two_ranks_is_another_order_of_sums_and_nothing_else(found, folder):
    alone = train_alone(job(ALONE, 7, folder, "alone"))
    for name in ("left alone", "other ranks"):
        assert found[name]["sha"] != alone["sha"], "other bits, or this compares nothing"
        assert found[name]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found[name]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert found[name]["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    assert found["left alone"]["sha"] != found["other ranks"]["sha"]


def test_checkpoints_move_between_one_process_and_turns(found, folder):
    """Whole tensors by name, each written once however many ranks hold it."""
    alone = train_alone(job(ALONE, 7, folder, "alone too"))
    taken_up = train_alone(job(ALONE, 7, folder, "to one process", resume=True))
    assert found["from one process"]["losses"] == pytest.approx(alone["losses"][3:], rel=1e-5)
    assert taken_up["losses"] == pytest.approx(alone["losses"][3:], rel=1e-5)
    ours, theirs = (
        read(folder / name / "checkpoints" / "step-00000003").manifest.tensors
        for name in ("to one process", "from one process")
    )
    assert {name for name in ours if "rng/" not in name} == {name for name in theirs if "rng/" not in name}


def test_a_short_last_batch_leaves_turns_without_samples(found):
    alone = train_alone({"kind": "gpt", "settings": SHORT, "plan": ALONE})
    assert found["a short last batch"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.soak
def test_replicated_stages_are_proved_bit_for_bit_and_a_lost_sum_is_caught():
    """Tied weights, dropout and clipping; traffic and sizes as predicted; mixed precision. Then the bug, and its control."""
    recipe = recipe_of("gpt", {"model": {"tied": True}, "data": {"samples": 64}})
    subject = build_subject(recipe)
    with Prover(steps=5) as prover:
        other = "dp=1 pp=3 replicas=1-2 microbatches=8"
        for text, precision in ((f"dp=1 {PLAN}", "float32"), (other, "float32"), (f"dp=1 {PLAN}", "bfloat16")):
            proved = prover.prove(subject, Plan.parse(text), precision)
            assert proved.ok and proved.bitwise, proved.first_difference
        caught = try_mutant(prover, MUTANTS[MUTANT], recipe, {})
        assert caught.caught and caught.control_ok, caught


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", ["dp=2 pp=3 zero=1", "dp=2 pp=3 zero=3", "dp=2 pp=3"])
def test_replicas_of_replicated_pipelines_are_proved_with_and_without_zero(text):
    subject = build_subject(recipe_of("gpt", {}))
    with Prover(steps=3) as prover:
        proved = prover.prove(subject, Plan.parse(f"{text} replicas=2-1 microbatches=4"), "float32")
    assert proved.ok and proved.bitwise, proved.first_difference


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_replicated_stages_in_mixed_precision_are_proved_bit_for_bit(precision):
    """Messages are of 16 bits, sums of copies of 32, and the scale of the loss is in both."""
    subject = build_subject(recipe_of("gpt", {"model": {"tied": True}, "optim": {"clip": 1.0}}))
    plans = (PLAN, "pp=3 replicas=1-2 microbatches=4", "pp=3 schedule=gpipe replicas=2-1 microbatches=8")
    with Prover(steps=5) as prover:
        for text in plans:
            proved = prover.prove(subject, Plan.parse(f"dp=1 {text}"), precision)
            assert proved.ok and proved.bitwise, proved.first_difference


REHEARSED = {
    "plan": "dp=1",
    "model": {"name": "gpt", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
    "data": {"source": "stdlib", "sequence": 16, "limit_bytes": 200_000},
    "train": {"steps": 10, "global_batch": 8, "seed": 3},
    "optim": {"name": "adamw", "lr": 1e-3, "clip": 1.0},
}


def traced(world, text):
    subject = build_rehearsed(validate(Recipe, REHEARSED, origin="test"))
    seen = trace_rank(subject, Plan.parse(text), world=world, num_steps=3)
    return {"traffic": traffic_rows(seen.traffic), "state": dict(seen.state)}


def test_what_is_rehearsed_is_what_ranks_count_and_hold():
    subject = build_rehearsed(validate(Recipe, REHEARSED, origin="test"))
    plan = resolve_plan(subject.recipe.train, Plan.parse(f"dp=1 {PLAN}")).plan
    expected = [
        {"traffic": traffic_rows(rank.traffic), "state": dict(rank.state)} for rank in rehearse_ranks(subject, plan)
    ]
    assert run_on_ranks(traced, 3, str(plan), deadline_seconds=100.0) == expected
