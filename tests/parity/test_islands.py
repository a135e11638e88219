"""Islands equal one process that plays all of them by the paper's rule, bit for bit, and their traffic is what was predicted."""

import pytest

from shoal.core.plan import Plan
from shoal.trainer.config import load_recipe
from shoal.verify.mutants.catalogue import MUTANTS
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject, check_plan
from shoal.verify.session import try_mutant
from support.processes.command import TINY

SETTINGS = ("train.steps=24", "train.global_batch=12", "optim.clip=0.5", "optim.schedule=cosine")
TWO = ("dp=2 sync=local:4@3", "dp=2 sync=easgd:3", "dp=2 sync=gossip:ring")
THREE = ("dp=3 sync=pushsum:random",)
FOUR = ("islands=2 dp=2 zero=3 sync=diloco:3 compress=int8", "islands=2 pp=2 sync=stream:4,2,1")
SOAKED = (
    "islands=2 dp=2 zero=3 sync=diloco:3",
    "dp=2 sync=local:3",
    "dp=2 sync=diloco:3",
    "dp=2 sync=slowmo:3",
    "dp=2 sync=stream:4,2,1",
    "dp=3 sync=diloco:3",
    "dp=3 sync=gossip:ring,2",
    "dp=4 sync=gossip:exponential",
    "dp=2 sync=pushsum:exponential",
    "dp=3 sync=local:3",
    "dp=3 sync=sparse:3,1",
    "dp=3 sync=stream:6,3,1",
    "dp=3 sync=easgd:2",
    "dp=3 sync=gossip:complete",
    "dp=4 sync=gossip:random",
    "dp=4 sync=pushsum:random",
    "islands=2 dp=2 sync=slowmo:4",
    "islands=2 dp=2 zero=1 sync=local:3",
    "islands=2 dp=2 zero=2 sync=easgd:3",
    "islands=2 dp=2 zero=1 sync=gossip:ring",
    "islands=2 pp=2 schedule=interleaved sync=diloco:4",
)
CAUGHT = (
    "last tensor of a round not exchanged",
    "heavy ball under the name of Nesterov",
    "outer gradient of the wrong sign",
    "outer momentum averaged twice",
    "fragment applied one step late",
    "fragment applied before it has arrived",
    "an island's loss divided by the samples of all",
    "push-sum weight forgotten",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TINY)
    return path


def prove(prover, recipe, text, *more):
    subject = build_subject(load_recipe(recipe, [*SETTINGS, *more]))
    plan = Plan.parse(text)
    check_plan(subject, plan)
    found = prover.prove(subject, plan, "float32")
    assert found.ok and found.bitwise and found.steps >= 10, f"{text}: {found.reason}"
    assert found.prediction.ok, (text, found.prediction.off)


@pytest.mark.parametrize(
    "plans", [TWO, FOUR, *(pytest.param(plans, marks=pytest.mark.soak) for plans in (THREE, SOAKED))], ids=len
)
def test_islands_equal_one_process_that_plays_them_all(recipe, plans):
    with Prover(steps=3) as prover:
        for plan in plans:
            prove(prover, recipe, plan)


@pytest.mark.soak
@pytest.mark.parametrize(
    "text",
    [
        "islands=2 dp=1 tp=2 sync=diloco:3",
        "islands=2 dp=1 cp=2 sync=local:3",
        "islands=2 dp=1 tp=2 sp=true sync=stream:4,2,1",
        "islands=2 dp=1 tp=2 sync=gossip:ring",
    ],
)
def test_layers_that_are_split_inside_islands_equal_the_oracle_by_the_law(recipe, text):
    """Split layers add in another order: not to the bit, but within the bounds of both precisions."""
    subject = build_subject(load_recipe(recipe, SETTINGS))
    plan = Plan.parse(text)
    check_plan(subject, plan)
    with Prover(steps=3) as prover:
        for precision in ("float32", "float64"):
            found = prover.prove(subject, plan, precision)
            assert found.ok and found.steps >= 6, f"{text} in {precision}: {found.reason}"
            assert found.prediction.ok, (text, found.prediction.off)


@pytest.mark.soak
def test_settings_of_policies_are_proved_too(recipe):
    """Rounds that lengthen as the rate falls; plain descent, averaged at every step; a graph of a file."""
    lengthening = ("replicas.interval=qsr", "replicas.interval_scale=0.0022", "optim.warmup=4")
    graph = recipe.parent / "line.json"
    graph.write_text('{"islands": 3, "edges": [[0, 1], [1, 2]]}')
    with Prover(steps=3) as prover:
        prove(prover, recipe, "dp=2 sync=local:2", *lengthening)
        prove(prover, recipe, "dp=2 sync=local:1", "optim.name=sgd")
        prove(prover, recipe, f"dp=3 sync=gossip:{graph}")
        # An epoch ends within the proof, with a batch that gives the islands unequal numbers of samples.
        prove(prover, recipe, "dp=2 sync=stream:4,2,1", "replicas.weigh=samples", "data.limit_bytes=1200")
        prove(
            prover,
            recipe,
            "dp=2 sync=diloco:3",
            "replicas.weigh=samples",
            "replicas.distance=2",
            "data.limit_bytes=1200",
        )


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_planted_bug_of_policies_is_caught(recipe):
    names = [name for name, mutant in MUTANTS.items() if "sync=" in mutant.plan]
    assert len(names) >= 9 and set(CAUGHT) < set(names)
    with Prover(steps=3) as prover:
        for name in names:
            found = try_mutant(prover, MUTANTS[name], load_recipe(recipe), {})
            assert found.caught and found.control_ok, found


COMPRESSED = (
    "dp=2 sync=diloco:3 compress=int8",
    "dp=2 sync=stream:4,2,1 compress=int4",
    "dp=3 sync=local:3 compress=topk:0.05",
    "islands=2 pp=2 sync=slowmo:3 compress=int4",
    "islands=2 dp=2 zero=1 sync=local:3 compress=sign",
    "islands=2 dp=2 zero=2 sync=slowmo:3 compress=qsgd:4",
    "islands=2 dp=2 zero=3 sync=stream:4,2,1 compress=int4",
    "islands=2 dp=2 zero=1 sync=local:3 compress=threshold:0.0005",
    "islands=2 dp=2 zero=2 sync=local:3 compress=natural",
    "dp=2 sync=diloco:3 compress=powersgd:2",
    "dp=2 sync=diloco:3 compress=randk:0.1",
    "dp=3 sync=gossip:ring compress=int4",
    "dp=3 sync=gossip:complete,2 compress=topk:0.1",
)


@pytest.mark.soak
def test_sparse_changes_equal_the_oracle(recipe):
    with Prover(steps=3) as prover:
        prove(prover, recipe, "dp=3 sync=sparse:3,0.05", "replicas.sparse_bits=2")
        prove(prover, recipe, "islands=2 pp=2 sync=sparse:3,0.1")


@pytest.mark.parametrize(
    "plans", [COMPRESSED[1:2], *(pytest.param((plan,), marks=pytest.mark.soak) for plan in COMPRESSED)], ids=str
)
def test_compressed_changes_equal_one_process_that_plays_all_islands(recipe, plans):
    with Prover(steps=3) as prover:
        for plan in plans:
            prove(prover, recipe, plan)
