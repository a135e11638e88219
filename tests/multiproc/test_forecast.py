"""What is said of a plan before any process starts, calls, bytes and state of every rank, equals what real ranks then count."""

import pytest

from shoal.comm.trafficcounter import traffic_rows
from shoal.comm.world import World
from shoal.core.config import validate
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan, all_plans
from shoal.engine.resolve import resolve_plan
from shoal.models.check import facts_of
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.config import Recipe
from shoal.tuning.rehearsal import build_subject, trace_rank
from support.training.rehearsals import rehearse_ranks

RECIPE = {
    "plan": "dp=1",
    "model": {"name": "gpt", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
    "data": {"source": "stdlib", "sequence": 16, "limit_bytes": 200_000},
    "train": {"steps": 10, "global_batch": 8, "seed": 3},
    "optim": {"name": "adamw", "lr": 1e-3, "clip": 1.0},
}
# Above DDP's first bucket of 1 MiB, so that gradients travel in several.
WIDE = {**RECIPE, "model": {"name": "gpt", "layers": 4, "hidden": 192, "heads": 4}}
EVERY_KIND = [
    "dp=2",
    "dp=2 zero=3 microbatches=2 recompute=full",
    "tp=2 sp=true",
    "cp=2",
    "cp=2 cp_kind=alltoall zero=1",
    "pp=2 schedule=1f1b",
    "pp=2 schedule=zbv",
    "pp=2 schedule=chimera",
]
"""One plan of everything that moves or holds something in its own way; the others are made of these, and are in the soak."""
EVERY_PRODUCT = ["dp=2 tp=2 sp=true zero=3", "dp=2 cp=2", "dp=2 pp=2 schedule=zb-h1 zero=3"]
TWO = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "dp=2 microbatches=2",
    "dp=2 zero=2 microbatches=2",
    "dp=2 zero=3 microbatches=2 recompute=full",
    "tp=2",
    "tp=2 sp=true",
    "tp=2 recompute=full",
    "tp=2 sp=true recompute=selective",
    "cp=2",
    "cp=2 cp_kind=alltoall",
    "cp=2 recompute=full",
    "cp=2 cp_kind=alltoall zero=1",
    "pp=2 schedule=gpipe",
    "pp=2 schedule=1f1b",
    "pp=2 schedule=1f1b recompute=full",
    "pp=2 schedule=interleaved",
    "pp=2 schedule=looped-bfs",
    "pp=2 schedule=zb-h1",
    "pp=2 schedule=zbv",
    "pp=2 schedule=chimera",
    "pp=2 schedule=dualpipev",
]
FOUR = [
    "dp=4 zero=3",
    "dp=2 tp=2",
    "dp=2 tp=2 sp=true zero=3",
    "dp=2 cp=2",
    "dp=2 cp=2 zero=2",
    "tp=2 sp=true cp=2",
    "dp=2 pp=2",
    "dp=2 pp=2 zero=1",
    "dp=2 pp=2 schedule=zb-h1 zero=3",
    "tp=2 sp=true pp=2",
    "cp=2 cp_kind=alltoall pp=2 schedule=zb-h1",
    "pp=4",
    "pp=4 schedule=interleaved",
]


def traced_on(world: World, recipe: dict, plans: list[str]) -> list[dict]:
    """On a real rank: what it counts and holds under each plan."""
    subject = build_subject(validate(Recipe, recipe, origin="test"))
    found = []
    for text in plans:
        plan = resolve_plan(subject.recipe.train, Plan.parse(text)).plan
        seen = trace_rank(subject, plan, world=world, num_steps=3)
        found.append({"traffic": traffic_rows(seen.traffic), "state": dict(seen.state)})
    return found


def compare(recipe: dict, plans: list[str], num_ranks: int, *, deadline_seconds: float) -> None:
    subject = build_subject(validate(Recipe, recipe, origin="test"))
    full = [str(resolve_plan(subject.recipe.train, with_replicas(text, num_ranks)).plan) for text in plans]
    expected = [
        [
            {"traffic": traffic_rows(rank.traffic), "state": dict(rank.state)}
            for rank in rehearse_ranks(subject, Plan.parse(text))
        ]
        for text in full
    ]
    real = run_on_ranks(traced_on, num_ranks, recipe, full, deadline_seconds=deadline_seconds)
    for number, text in enumerate(full):
        for rank in range(num_ranks):
            assert expected[number][rank] == real[rank][number], f"{text}, rank {rank}"
            assert real[rank][number]["traffic"], "a plan over several ranks moves something"


def with_replicas(text: str, num_ranks: int) -> Plan:
    plan = Plan.parse(text if "dp=" in text else f"dp=1 {text}")
    assert plan.world_size == num_ranks
    return plan


def test_two_ranks_count_and_hold_what_was_forecast():
    compare(RECIPE, EVERY_KIND, 2, deadline_seconds=100)


@pytest.mark.soak
def test_four_ranks_count_and_hold_what_was_forecast():
    compare(RECIPE, EVERY_PRODUCT, 4, deadline_seconds=100)


def test_buckets_of_a_larger_model_are_forecast():
    compare(WIDE, ["dp=2"], 2, deadline_seconds=100)


@pytest.mark.soak
@pytest.mark.parametrize("plans", [TWO[:8], TWO[8:15], TWO[15:]], ids=["data", "tensor-context", "pipeline"])
def test_two_ranks_and_many_plans(plans):
    compare(RECIPE, plans, 2, deadline_seconds=100)


@pytest.mark.soak
@pytest.mark.parametrize("plans", [FOUR[:6], FOUR[6:10], FOUR[10:]], ids=["whole", "stages", "deep"])
def test_four_ranks_and_many_plans(plans):
    compare(RECIPE, plans, 4, deadline_seconds=100)


@pytest.mark.soak
def test_buckets_are_forecast_with_microbatches():
    compare(WIDE, ["dp=2 microbatches=2"], 2, deadline_seconds=100)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_synchronous_plan_is_forecast(num_ranks):
    subject = build_subject(validate(Recipe, RECIPE, origin="test"))
    found = all_plans(num_ranks, facts_of(subject.recipe.model, subject.data.spec))
    plans = [str(plan) for plan in found if plan.pp == 1 or not schedule_facts(plan.schedule).is_asynchronous]
    assert len(plans) > 40
    compare(RECIPE, plans, num_ranks, deadline_seconds=1800)
