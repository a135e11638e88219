"""Estimates: their parts add up, shares are shares, and closed forms agree with schedules."""

from dataclasses import replace

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.planner.hardware.clusters import read_cluster
from shoal.planner.pricing.memory import CONTEXT_BYTES, price_memory
from shoal.planner.search.estimate import estimate, estimate_by_schedule
from shoal.planner.search.explain import explain, time_parts, why_not
from support.planner.jobs import job_of, shape_of

PLANS = [
    Plan(dp=16, microbatches=4),
    Plan(dp=16, microbatches=1, zero=3),
    Plan(dp=2, tp=8, sp=True, microbatches=8, recompute="full"),
    Plan(dp=2, tp=2, cp=4, microbatches=8),
    Plan(dp=2, tp=2, pp=4, schedule="1f1b", microbatches=8, zero=1),
    Plan(dp=4, pp=4, schedule="interleaved", chunks=2, microbatches=16),
    Plan(dp=4, pp=4, schedule="zbv", chunks=2, microbatches=16),
    Plan(dp=4, pp=4, schedule="zb-h1", microbatches=16, recompute="selective"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("found_by", [estimate, estimate_by_schedule])
def test_where_the_time_goes_adds_up_to_the_step(plan, found_by):
    found = found_by(job_of(), plan)
    parts = time_parts(found)
    assert sum(parts.values()) == pytest.approx(found.seconds) and min(parts.values()) >= 0
    assert parts["compute"] > 0 and 0 <= found.bubble < 1
    assert (parts["pipeline bubble"] > 1e-12) == (plan.pp > 1)
    assert ("tp communication" in parts) == (plan.tp > 1)
    assert found.tokens_per_second == pytest.approx(64 * 1024 / found.seconds)
    assert 0 < found.utilisation < 0.5, "matmul reaches half of the peak here"


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.pp > 1], ids=str)
def test_closed_forms_and_schedules_agree_within_a_twentieth(plan):
    job = job_of(shape_of(layers=32), software="megatron-core")
    short, long = estimate(job, plan), estimate_by_schedule(job, plan)
    assert long.by_schedule and not short.by_schedule
    assert short.seconds == pytest.approx(long.seconds, rel=0.05)
    assert short.memory.allocated >= long.memory.allocated * (1 - 1e-9)


@pytest.mark.parametrize("found_by", [estimate, estimate_by_schedule])
def test_stages_of_several_ranks_are_not_priced_and_this_is_said(found_by):
    plan = Plan(dp=4, pp=4, schedule="1f1b", replicas="2-1-1", microbatches=8)
    with pytest.raises(
        RequestError, match=r"replicas=2-1-1\) are not priced on a cluster; leave replicas out, .*forecast"
    ):
        found_by(job_of(), plan)


@pytest.mark.parametrize("layers", [9, 17, 30])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("zbv", 2), ("zb-h1", None)])
def test_the_fullest_rank_is_found_where_blocks_are_not_even(layers, schedule, chunks):
    job = job_of(shape_of(layers=layers, sequence=4096, hidden=2048), global_batch=64)
    plan = Plan(dp=2, pp=4, schedule=schedule, chunks=chunks, microbatches=32)
    ranks = price_memory(job, plan)
    assert estimate(job, plan).memory.allocated == max(memory.allocated for memory in ranks)


def test_headroom_is_what_the_device_has_left():
    found = estimate(job_of(), PLANS[0])
    assert found.limit == 80 * 2**30 - CONTEXT_BYTES
    assert found.headroom == found.limit - found.memory.allocated and found.fits
    tight = estimate(job_of(shape_of(hidden=8192, heads=64, layers=40)), PLANS[0])
    assert not tight.fits and tight.headroom < 0


def test_utilisation_does_not_count_what_is_done_again():
    job = job_of()
    none, full = (estimate(job, replace(PLANS[0], recompute=recompute)) for recompute in ("none", "full"))
    assert full.seconds > none.seconds and full.utilisation * full.seconds == pytest.approx(
        none.utilisation * none.seconds
    )


@pytest.mark.parametrize("software", ["megatron", "megatron-core", "shoal"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_that_is_too_long_to_be_played_goes_on_from_those_that_are(software, schedule):
    """Over a slow link, with a last stage that has more to do: a transfer is as long as a forward pass."""
    each = []
    for microbatches, is_played in ((496, True), (504, False)):
        job = job_of(shape_of(layers=32, hidden=4096, heads=32), software=software, global_batch=microbatches)
        job = replace(job, cluster=read_cluster("a100-80gb:8x1@ethernet-10g"))
        found = estimate_by_schedule(job, Plan(dp=1, pp=8, schedule=schedule, microbatches=microbatches))
        assert found.by_schedule is is_played and 0 < found.exposed["pp"] < 1
        assert found.parts.overlaps_transfer is (software != "megatron"), "our own runtime sends without waiting"
        assert found.parts.transfer > 0.5 * found.parts.stages[1].forward
        assert sum(time_parts(found).values()) == pytest.approx(found.seconds)
        each.append(found.seconds / microbatches)
    assert each[1] == pytest.approx(each[0], rel=0.005)


def test_large_schedules_keep_their_closed_form_and_impossible_ones_are_refused():
    job = job_of(shape_of(layers=64), cluster="a100:8x8", global_batch=4096)
    plan = Plan(dp=1, pp=64, schedule="1f1b", microbatches=4096)
    assert not estimate_by_schedule(job, plan).by_schedule
    with pytest.raises(RequestError, match="odd"):
        estimate_by_schedule(job_of(), Plan(dp=1, pp=16, schedule="chimera", microbatches=1))


def test_the_first_plan_is_explained_beside_the_second():
    job = job_of()
    best, second = sorted((estimate(job, PLANS[0]), estimate(job, PLANS[4])), key=lambda one: one.seconds)
    lines = explain([best, second])
    assert lines[0].startswith(f"{best.plan}: compute ")
    assert f"{second.plan} is {second.seconds / best.seconds - 1:.1%} slower" in lines[1]
    assert f"{second.seconds:.4g} s in place of {best.seconds:.4g} s" in lines[1] and len(lines) > 2
    assert explain([best]) == lines[:1]
    assert not any("comes first although" in line for line in lines)
    turned = explain([second, best])
    assert turned[-1].startswith(f"{second.plan} comes first although {best.plan} is ")
    assert f"{second.seconds / best.seconds - 1:.1%} faster" in turned[-1]


def test_the_differences_are_the_whole_difference():
    job = job_of()
    one, other = estimate(job, PLANS[0]), estimate(job, PLANS[4])
    own, theirs = time_parts(one), time_parts(other)
    changes = sum(theirs.get(name, 0.0) - own.get(name, 0.0) for name in {*own, *theirs})
    assert changes == pytest.approx(other.seconds - one.seconds)


def test_why_not_names_both_numbers_and_the_cure():
    job = job_of(shape_of(hidden=8192, heads=64, layers=40), cluster="a100-40gb:2x8")
    best = estimate(job, Plan(dp=2, tp=8, sp=True, microbatches=32, zero=1, recompute="full"))
    asked = estimate(job, Plan(dp=16, microbatches=4))
    first, *rest = why_not(asked, best)
    assert f"needs {asked.memory.allocated / 2**30:.1f} GiB and {asked.limit / 2**30:.1f} are free" in first
    assert "the largest part is optimizer" in first and "zero=1" in first and rest
    assert why_not(best, best)[-1] == f"{best.plan} is the fastest plan that was found"


@pytest.mark.parametrize("part", ["activations", "optimizer", "gradients", "weights", "working", "versions"])
def test_every_part_of_memory_has_a_cure(part):
    best = estimate(job_of(), PLANS[0])
    memory = replace(best.memory, **{part: 1e15})
    assert f"the largest part is {part}" in why_not(replace(best, memory=memory), best)[0]
