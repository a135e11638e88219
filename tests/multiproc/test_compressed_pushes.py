"""Compressed pushes of real workers: the bytes that went over are the formula's, and every push is proved by a second codec."""

import json

import pytest
import torch

from shoal.checkpoint.reader import read
from shoal.checkpoint.whole import newest_whole
from shoal.core.compressrule import CompressRule
from shoal.core.plan import Plan
from shoal.engine.state import draw_outline
from shoal.optim.groups import decide_groups
from shoal.paramserver.pushcodec import PushCodec
from shoal.paramserver.server.kept import KeptResiduals
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.sharding import cut_for
from shoal.paramserver.worker.flat import describe_model
from shoal.serverrun.server.residuals import held_residuals, load_residuals
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe, load_recipe
from shoal.verify.mutants.catalogue import Death
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from shoal.verify.session import verify
from support.processes.command import read_summary, wait_until

TABLES = {
    "model": {"name": "gpt", "layers": 2, "hidden": 32, "heads": 2, "dropout": 0.1},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 70, "sequence": 8, "vocab": 17},
    "train": {"steps": 20, "global_batch": 8},
    "optim": {"name": "adamw", "lr": 0.01},
    "compression": {"min_elements": 256},
}
PROVED = [
    "compress=int8",
    "update=ssp:1 compress=int4",
    "update=async compress=qsgd:4",
    "compress=topk:0.1",
    "compress=randk:0.1",
    "update=async compress=threshold:0.001",
    "compress=sign",
    "compress=natural",
    "compress=fp8",
    "compress=bf16",
    "update=downpour:2,2 compress=fp16@4",
]


def pushed_bytes(recipe, plan):
    """Of all pushes of a whole run, by the codec's formula."""
    model, _, _ = build_parts(recipe)
    specs = describe_model(model)
    shards = cut_for(specs, plan.ps, config=recipe.paramserver, optimizer=recipe.optim.name).shards
    rule = CompressRule.parse(plan.compress)
    codec = PushCodec(rule, recipe.compression, model=specs, seed=recipe.train.seed, num_shares=plan.num_shares)
    return recipe.train.steps * plan.num_shares * sum(map(codec.num_bytes, shards))


@pytest.mark.timeout(300)
def test_the_bytes_that_workers_push_are_those_of_the_formula(shoal, tiny):
    plan = Plan.parse("ps=2 workers=2 update=bsp compress=int4")
    shoal.run("train", tiny, "--plan", str(plan), "--run-dir", "run", "--set", "train.steps=4", timeout=200)
    assert read_summary(shoal.folder / "run")["status"] == "completed"
    recipe = load_recipe(tiny, ["train.steps=4"])
    events = [
        json.loads(line)
        for path in (shoal.folder / "run" / "events").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    told = [event["pushed_bytes"] for event in events if event["kind"] == "traffic"]
    assert len(told) == 2 and sum(told) == pushed_bytes(recipe, plan)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_goes_on_with_what_its_workers_had_not_sent(shoal, tiny):
    """To the bits of the run that was left alone; with another number of workers the sum is kept."""
    words = ["--set", "train.steps=60", "--set", "train.global_batch=12", "--set", "checkpoint.every=6"]
    words += ["--set", "compression.min_elements=64"]
    two = ["--plan", "ps=2 workers=2 update=bsp compress=int4", *words]
    shoal.run("train", tiny, *two, "--run-dir", "alone", timeout=200)
    process = shoal.start("train", tiny, *two, "--run-dir", "killed")
    root = shoal.folder / "killed" / "checkpoints"
    wait_until(lambda: newest_whole(root).path is not None if root.is_dir() else False, "a checkpoint", 60)
    process.kill()
    process.wait()
    assert not (shoal.folder / "killed" / "summary.json").exists(), "it was killed in the middle"
    path = newest_whole(root).path
    step, recipe = int(path.name.rpartition("-")[2]), load_recipe(tiny, words[1::2])
    saved = read(path).tensors
    model, _, _ = build_parts(recipe)
    for workers in (2, 3):
        # The shards of as many servers, which cut tensors in other places than the two that saved them.
        total = {}
        shards = cut_for(describe_model(model), workers, config=recipe.paramserver, optimizer="adamw").shards
        names = {entry.parameter: name for name, entry in draw_outline(model).items() if entry.parameter}
        for shard in shards:
            state = make_shard(shard, model, recipe, workers)
            said = load_residuals(state, path, names, expect=None)
            assert (said is None) == (workers == 2), said
            tensors, places, _ = held_residuals(state, names, 60)
            for key, tensor in tensors.items():
                if "/residual/" in key:
                    name, rows = key.partition("#")[0].split("/", 3)[3], places[key].patches[0]
                    total.setdefault(name, {}).setdefault(rows.whole_start[0], []).append(tensor)
        for name, parts in total.items():
            found = torch.cat([sum(parts[start]) for start in sorted(parts)])
            given = sum(saved[f"compression/residual/{index}/{name}"] for index in range(2))
            assert torch.equal(found, given) and given.abs().sum() > 0, name
    assert total and 0 < step < 60
    shoal.run("train", tiny, *two, "--run-dir", "killed", "--resume", timeout=200)
    ends = [read_summary(shoal.folder / name)["weights_sha256"] for name in ("alone", "killed")]
    assert ends[0] == ends[1]


def make_shard(shard, model, recipe, workers):
    """A shard of a run with so many workers that keeps what they have not sent."""
    specs = describe_model(model)
    groups = decide_groups(recipe.optim, model)
    state = ShardState(shard, model=specs, optim=recipe.optim, groups=groups)
    state.codec = PushCodec(
        CompressRule.parse("int4"),
        recipe.compression,
        model=specs,
        seed=recipe.train.seed,
        num_shares=workers,
        saved_every=6,
        last_step=60,
    )
    state.kept = KeptResiduals(state.codec.kept_numel(shard))
    return state


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rule", PROVED)
def test_every_push_is_what_the_codec_of_the_proof_makes_of_it(rule):
    found = verify(TABLES, f"ps=2 workers=2 {rule}").plans[0]
    assert found.ok and found.bitwise, (found.reason, found.first_difference)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_backup_that_takes_over_has_the_pushes_that_were_compressed():
    subject, plan = (
        build_subject(Recipe.model_validate(TABLES)),
        Plan.parse("ps=2 workers=2 update=bsp backup=1 compress=int4"),
    )
    with Prover(steps=10) as prover:
        found = prover.prove(subject, plan, "float32", deaths=[Death("server-0", 1)])
    assert found.ok and found.bitwise, (found.reason, found.first_difference)
