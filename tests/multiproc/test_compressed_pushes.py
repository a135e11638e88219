"""Compressed pushes of real workers: the bytes that went over are the formula's, and every push is proved by a second codec."""

import json

import pytest

from shoal.core.compressrule import CompressRule
from shoal.core.plan import Plan
from shoal.paramserver.pushcodec import PushCodec
from shoal.paramserver.sharding import cut_for
from shoal.paramserver.worker.flat import describe_model
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe, load_recipe
from shoal.verify.mutants.catalogue import Death
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from shoal.verify.session import verify
from support.processes.command import read_summary

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
