"""Closed forms of a pipeline's length, against the schedules themselves."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.planner.pricing.closed_form import pipeline_seconds
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.step import schedule_for, simulate_step

WORK = st.tuples(st.floats(0.8, 1.5), st.floats(0.8, 2.0), st.floats(0.4, 0.8))
"""Forward, and the two halves of the backward: weights' gradients take no longer than either."""


def parts_of(plan: Plan, work: tuple[float, float, float], transfer: float = 0.0, overlaps: bool = True) -> StepParts:
    forward, by_input, weight = work
    stage = StageTimes(forward=forward, input=by_input, weight=weight)
    return StepParts(
        stages=(stage,) * (plan.pp * (plan.chunks or 1)),
        microbatches=plan.microbatches or 1,
        transfer=transfer,
        overlaps_transfer=overlaps,
    )


def plan_of(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Plan:
    each = chunks or schedule_facts(name).chunks
    return Plan(dp=1, pp=ranks, schedule=name, chunks=each if each > 1 else None, microbatches=microbatches)


def ratio(plan: Plan, work: tuple[float, float, float], transfer: float = 0.0, overlaps: bool = True) -> float:
    parts = parts_of(plan, work, transfer, overlaps)
    try:
        schedule = schedule_for(plan, parts.microbatches)
    except RequestError:
        return 1.0
    return pipeline_seconds(parts, plan) / simulate_step(parts, schedule, plan=plan).step_seconds


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "pipedream-flush", "zb-h1"]),
    ranks=st.integers(2, 9),
    more=st.integers(0, 20),
    work=WORK,
)
def test_one_stage_a_rank_takes_what_the_closed_form_says(name, ranks, more, work):
    assert ratio(plan_of(name, ranks, ranks + more), work) == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["interleaved", "looped-bfs"]),
    ranks=st.integers(2, 6),
    rounds=st.integers(1, 4),
    chunks=st.integers(2, 4),
    work=WORK,
)
def test_interleaved_takes_what_the_closed_form_says_in_whole_rounds(name, ranks, rounds, chunks, work):
    assert ratio(plan_of(name, ranks, ranks * rounds, chunks), work) == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 6), microbatches=st.integers(1, 20), chunks=st.integers(2, 4))
def test_interleaved_in_rounds_that_are_not_whole(ranks, microbatches, chunks):
    """A group of more microbatches than ranks goes round together, so nothing is lost (``families/loop.py``)."""
    assert ratio(plan_of("interleaved", ranks, microbatches, chunks), (1.0, 1.0, 1.0)) == pytest.approx(1.0)


BOUNDS = {
    "zb-h2": (0.999, 1.12),
    "zbv": (0.999, 1.08),
    "v-half": (0.96, 1.25),
    "v-min": (0.99, 1.38),
    "dualpipe": (0.9, 1.12),
    "dualpipev": (0.9, 1.12),
}
"""Closed form over schedule, of pipelines of 2 to 8 ranks: short ones are the worst, because little else is in their steps."""


@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 8), more=st.integers(0, 12), by_input=st.floats(1.0, 2.0), weight=st.floats(0.4, 1.0))
@example(ranks=2, more=0, by_input=2.0, weight=0.4)
@example(ranks=8, more=6, by_input=2.0, weight=1.0)
@example(ranks=8, more=0, by_input=1.0, weight=0.4)
def test_families_with_two_backwards_are_within_a_bound(name, ranks, more, by_input, weight):
    """From as many microbatches as ranks on, where the gradient of the input takes longest and that of weights least."""
    low, high = BOUNDS[name]
    if name == "dualpipe":
        ranks, more = 2 * ((ranks + 1) // 2), 2 * (more // 2)
    assert low <= ratio(plan_of(name, ranks, ranks + more), (1.0, by_input, weight)) <= high


@pytest.mark.parametrize("name", ["zb-h2", "zbv", "v-half", "v-min", "dualpipev"])
def test_long_steps_of_like_cells_are_within_two_percent(name):
    assert ratio(plan_of(name, 8, 64), (1.0, 1.0, 1.0)) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vsync", "pipedream-2bw"])
def test_a_stream_has_no_bubble(name):
    plan = plan_of(name, 4, 8)
    assert pipeline_seconds(parts_of(plan, (1.0, 1.5, 0.5)), plan) == 8 * 3.0
    assert ratio(plan, (1.0, 1.5, 0.5)) == pytest.approx(1.0)


def test_the_slowest_stage_sets_the_pace_and_the_others_are_passed_once():
    stages = tuple(StageTimes(forward=time, input=time, weight=time) for time in (1.0, 2.0, 1.0))
    plan = plan_of("1f1b", 3, 5)
    assert pipeline_seconds(StepParts(stages=stages, microbatches=5), plan) == 3 * (5 * 2.0 + 1.0 + 1.0)


TRANSFERS = (0.02, 0.25, 1.0)
"""Up to as long as a forward pass."""


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved", "looped-bfs"])
@settings(max_examples=10, deadline=None)
@given(ranks=st.integers(2, 6), rounds=st.integers(1, 4), work=WORK)
def test_transfers_that_a_software_waits_for_make_passes_longer_and_nothing_else(name, transfer, ranks, rounds, work):
    """So the forms are as exact as without them."""
    plan = plan_of(name, ranks, ranks * rounds)
    assert ratio(plan, work, transfer, overlaps=False) == pytest.approx(1.0)
    forward, by_input, weight = work
    longer = parts_of(plan, (forward + transfer, by_input + transfer, weight))
    assert pipeline_seconds(parts_of(plan, work, transfer, False), plan) == pytest.approx(
        pipeline_seconds(longer, plan)
    )


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("name", ["gpipe", "looped-bfs"])
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(2, 6), more=st.integers(0, 12), chunks=st.integers(2, 4), work=WORK)
def test_schedules_of_two_phases_hide_all_transfers_but_those_that_fill_them(name, transfer, ranks, more, chunks, work):
    plan = plan_of(name, ranks, ranks + more, chunks if name == "looped-bfs" else None)
    assert ratio(plan, work, transfer) == pytest.approx(1.0)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("name", ["1f1b", "pipedream-flush", "zb-h1"])
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(2, 9), more=st.integers(0, 20), work=WORK)
def test_one_stage_a_rank_waits_for_transfers_as_the_closed_form_says(name, transfer, ranks, more, work):
    """But for three transfers, whatever the number of microbatches: they come one by one, and the form has their mean."""
    plan = plan_of(name, ranks, ranks + more)
    parts = parts_of(plan, work, transfer)
    assert abs(pipeline_seconds(parts, plan) - simulate_step(parts, plan=plan).step_seconds) <= 3 * transfer


@pytest.mark.parametrize("transfer", TRANSFERS)
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(2, 6), rounds=st.integers(1, 4), chunks=st.integers(2, 4), work=WORK)
def test_interleaved_hides_transfers_as_long_as_a_forward(transfer, ranks, rounds, chunks, work):
    plan, work = plan_of("interleaved", ranks, ranks * rounds, chunks), (max(work[0], transfer), *work[1:])
    assert ratio(plan, work, transfer) == pytest.approx(1.0)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("transfer", TRANSFERS)
@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 8), more=st.integers(0, 12), by_input=st.floats(1.0, 2.0), weight=st.floats(0.4, 1.0))
def test_zbv_with_transfers_is_as_near_as_without(overlaps, transfer, ranks, more, by_input, weight):
    """Its bound is wider below by two hundredths: a short step has fewer transfers than the form for long ones counts."""
    low, high = BOUNDS["zbv"]
    found = ratio(plan_of("zbv", ranks, ranks + more), (1.0, by_input, weight), transfer, overlaps)
    assert low - 0.02 <= found <= high


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("transfer", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv"])
def test_long_steps_go_on_from_the_played_ones_with_any_transfer(name, transfer, overlaps):
    """Of like stages, within a hundredth: what a microbatch takes is right, and what fills the pipeline counts little."""
    assert ratio(plan_of(name, 4, 96), (1.0, 1.5, 0.5), transfer, overlaps) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_a_stream_waits_for_transfers_as_1f1b_does(name, overlaps):
    assert ratio(plan_of(name, 4, 32), (1.0, 1.5, 0.5), 0.25, overlaps) == pytest.approx(1.0, abs=0.005)


def test_1f1b_hides_no_transfer():
    """By hand: p microbatches are in flight, and come round in p passes of every kind and 2 (p - 1) transfers."""
    plan = plan_of("1f1b", 4, 64)
    beside, inside = (
        pipeline_seconds(parts_of(plan, (1.0, 1.0, 1.0), 0.25, overlaps), plan) for overlaps in (True, False)
    )
    assert beside == pytest.approx((64 + 3) * 3.0 + 0.25 * (2 * 3 + 2 * 2 + 60 * 2 * 3 / 4))
    assert inside == pytest.approx((64 + 3) * 3.5)


def test_one_rank_does_everything_one_after_the_other():
    plan = Plan(dp=2, microbatches=3)
    assert pipeline_seconds(parts_of(plan, (1.0, 2.0, 0.5)), plan) == 10.5
