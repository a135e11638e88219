"""Compressed gradients equal one process that plays all replicas by the papers' rules, bit for bit, and so does their memory."""

import pytest

from shoal.core.plan import Plan
from shoal.trainer.config import load_recipe
from shoal.verify.mutants.catalogue import MUTANTS
from shoal.verify.mutants.compression_bugs import COMPRESSED
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject, check_plan
from shoal.verify.session import try_mutant
from support.processes.command import TINY

SETTINGS = ("train.steps=24", "train.global_batch=12", "optim.clip=0.5", "optim.schedule=cosine")
TWO = (
    "dp=2 zero=1 compress=int4",
    "dp=2 compress=topk:0.05@2",
)
PIPELINE = ("dp=2 pp=2 schedule=1f1b compress=powersgd:2",)
CODECS = (
    *("fp16", "bf16", "fp8", "int8", "int8:24@3", "int4", "sign", "qsgd:2", "qsgd:8", "natural"),
    *("topk:0.05", "threshold:0.001", "randk:0.1", "dgc:0.02@2", "powersgd:2"),
)
LAYOUTS = {
    2: ("dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=2 microbatches=3"),
    3: ("dp=3",),
    4: ("dp=4", "dp=2 pp=2", "dp=2 pp=2 zero=1", "dp=2 pp=2 schedule=interleaved"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TINY)
    return path


def prove(prover, recipe, text, *more):
    subject = build_subject(load_recipe(recipe, [*settings_of(text), *more]))
    plan = Plan.parse(text)
    check_plan(subject, plan)
    found = prover.prove(subject, plan, subject.recipe.train.precision)
    assert found.ok and found.bitwise and found.steps >= 10, f"{text} {more}: {found.reason}"
    assert found.prediction.ok, (text, found.prediction.off)
    return found


def settings_of(text):
    """DGC and 1-bit Adam clip each replica's own gradient, of which no rank of a pipeline has all."""
    is_own = "dgc" in text or "onebit" in text
    return [one for one in SETTINGS if not ("clip" in one and is_own and "pp=" in text)]


@pytest.mark.parametrize("plans", [TWO, pytest.param(PIPELINE, marks=pytest.mark.soak)], ids=["replicas", "pipeline"])
def test_compressed_gradients_equal_one_process_that_plays_all_replicas(recipe, plans):
    with Prover(steps=3) as prover:
        for plan in plans:
            prove(prover, recipe, plan)


MORE = (
    ("dp=2 compress=onebit@3",),
    ("dp=2 compress=onebit@3", "optim.weight_decay=0.1", "optim.name=lamb"),
    ("dp=2 pp=2 compress=onebit@3",),
    ("dp=2 pp=2 compress=onebit@3", "optim.weight_decay=0.1", "optim.name=lamb"),
    ("dp=3 compress=onebit@2", "optim.name=adam"),
    ("dp=2 compress=int8", "compression.round=keyed"),
    ("dp=2 compress=int8", "compression.residual=true", "compression.both_ways=false"),
    ("dp=2 compress=int4", "compression.back=same"),
    ("dp=3 compress=sign", "compression.back=int8"),
    ("dp=4 compress=int4:24", "compression.round=keyed"),
    ("dp=2 compress=randk:0.1", "compression.residual=false"),
    ("dp=2 compress=dgc:0.02", "compression.warmup=6", "optim.name=sgd"),
    ("dp=2 compress=fp16", "train.precision=bfloat16"),
    ("dp=2 compress=int4", "model.tied=true"),
    ("dp=2 pp=2 compress=int4", "model.tied=true"),
    ("dp=4 compress=onebit@2",),
    ("dp=2 pp=2 schedule=chimera microbatches=2 compress=int4",),
    ("dp=2 zero=1", "compression.weights=int8"),
    ("dp=3 zero=3 compress=int8@2", "compression.weights=int4", "compression.block=24"),
    ("dp=2 pp=2 zero=1", "compression.weights=int8"),
)
"""Plans with the settings that change what is sent, or what is done with it."""


@pytest.mark.soak
@pytest.mark.parametrize("case", MORE, ids=" ".join)
def test_settings_of_compression_are_proved_too(recipe, case):
    with Prover(steps=10) as prover:
        prove(prover, recipe, *case)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_planted_bug_of_compression_is_caught(recipe):
    with Prover(steps=3) as prover:
        controls = {}
        for mutant in COMPRESSED:
            found = try_mutant(prover, mutant, load_recipe(recipe), controls)
            assert found.caught and found.control_ok, found


def test_a_planted_bug_is_caught_by_what_a_replica_remembers(recipe):
    with Prover(steps=3) as prover:
        found = try_mutant(prover, MUTANTS["error memory never kept"], load_recipe(recipe), {})
    assert found.caught and found.control_ok and "/residual-0" in found.detail


@pytest.mark.soak
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_under_every_layout(recipe, codec):
    with Prover(steps=3) as prover:
        for layouts in LAYOUTS.values():
            for layout in layouts:
                text = f"{layout} compress={codec}"
                prove(prover, recipe, text)
