"""A played step: equal to the schedule's own price, to every rank written out, and to what can be worked out by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.conditions import Conditions, Slow, factors_of
from shoal.planner.simulation.step import schedule_for, simulate_step, step_times
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.pricing import Costs, price
from support.planner.rank_by_rank_step import play_every_rank

SYNCHRONOUS = [name for name, family in FAMILIES.items() if not family.updates.are_asynchronous]
ASYNCHRONOUS = [name for name, family in FAMILIES.items() if family.updates.are_asynchronous]


def parts_of(num_stages: int, microbatches: int, *, talk: float = 0.0, **rest) -> StepParts:
    exposed = {"tp": talk} if talk else {}
    stage = StageTimes(forward=1.0, input=1.25, weight=0.75, exposed=exposed)
    return StepParts(stages=(stage,) * num_stages, microbatches=microbatches, **rest)


COLLECTIVES = {"reduce": 2.0, "reduce_hidden": 1.5, "gather": 1.0, "gather_hidden": 0.25, "update": 0.5, "fixed": 0.125}


@pytest.mark.parametrize("name", FAMILIES)
def test_without_collectives_the_pipeline_is_what_the_schedule_is_priced_at(name):
    plan = Plan(pp=4, dp=3, schedule=name)
    schedule = schedule_for(plan, 8)
    parts = parts_of(schedule.grid.num_stages, 8, transfer=0.1)
    played = simulate_step(parts, plan=plan)
    priced = price(schedule, Costs(forward=1.0, input=1.25, weight=0.75, transfer=0.1))
    assert played.makespan == priced.makespan
    assert [list(zip(*(times[list(row)] for times in played.times(0)), strict=True)) for row in played.order.rows] == [
        list(row) for row in priced.spans
    ]
    if name in SYNCHRONOUS:
        assert played.step_seconds == priced.makespan
        assert played.bubble == pytest.approx(priced.bubble, abs=1e-12)


def test_stages_of_their_own_length_price_alike():
    plan = Plan(pp=3, dp=1)
    sizes = (1.0, 2.5, 0.5)
    stages = tuple(StageTimes(forward=size, input=size, weight=size) for size in sizes)
    played = simulate_step(StepParts(stages=stages, microbatches=6), plan=plan)
    assert played.makespan == price(schedule_for(plan, 6), Costs(stages=sizes)).makespan


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_step_is_its_pipeline_and_what_comes_after_it(name, zero):
    plan = Plan(pp=4, dp=2, tp=2, schedule=name, zero=zero)
    parts = parts_of(schedule_for(plan, 8).grid.num_stages, 8, talk=0.5, **COLLECTIVES)
    played = simulate_step(parts, plan=plan)
    assert played.step_seconds == pytest.approx(played.makespan + parts.after_pipeline, rel=1e-12)


def test_one_device_does_one_microbatch_after_another():
    parts = parts_of(1, 5, update=0.5, fixed=0.25)
    played = simulate_step(parts, plan=Plan(dp=1))
    assert played.step_seconds == 5 * 3.0 + 0.75 and played.bubble == 0.0


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (8, 64)])
def test_the_bubble_of_1f1b_is_the_closed_form(pp, microbatches):
    """(p - 1) / (m + p - 1): Narayanan et al. 2021, section 2.2."""
    played = simulate_step(parts_of(pp, microbatches), plan=Plan(dp=1, pp=pp))
    assert played.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1), rel=1e-12)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_stream_of_steps_has_no_bubble_and_an_update_in_its_cells(name):
    """PipeDream's steady state: a step takes what one rank has to do in it."""
    plan = Plan(pp=4, dp=1, schedule=name)
    played = simulate_step(parts_of(4, 8), plan=plan)
    assert played.step_seconds == pytest.approx(8 * 3.0, rel=1e-12)
    assert played.bubble == pytest.approx(0.0, abs=1e-12)
    # Under 2BW every rank updates once a step, each at another moment, and the others wait for it.
    updates = 4 if name == "pipedream-2bw" else 8
    later = simulate_step(parts_of(4, 8, update=0.5), plan=plan)
    assert later.step_seconds == pytest.approx(8 * 3.0 + updates * 0.5, rel=1e-12)
    assert later.breakdown["update"] == pytest.approx(updates * 0.5, rel=1e-9)
    assert simulate_step(parts_of(4, 8, fixed=0.25), plan=plan).step_seconds == pytest.approx(8 * 3.0 + 0.25, rel=1e-12)


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_the_critical_path_has_no_gaps_and_adds_up_to_the_step(name):
    plan = Plan(pp=4, dp=2, schedule=name)
    parts = parts_of(schedule_for(plan, 8).grid.num_stages, 8, talk=0.5, transfer=0.3, **COLLECTIVES)
    played = simulate_step(parts, plan=plan, conditions=Conditions(slow=(Slow(index=3, factor=1.5),)))
    path = played.critical_path
    for before, after in itertools.pairwise(path):
        assert after.start == pytest.approx(before.end, abs=1e-9)
    assert sum(piece.seconds for piece in path) == pytest.approx(played.step_seconds, rel=1e-9)
    assert sum(played.breakdown.values()) == pytest.approx(played.step_seconds, rel=1e-9)
    assert {"compute", "tp", "pp"} <= set(played.breakdown)


def test_a_path_says_what_a_step_waits_for():
    played = simulate_step(parts_of(2, 4, talk=0.5, transfer=0.25, **COLLECTIVES), plan=Plan(pp=2, dp=2, tp=2, zero=1))
    after = {"dp": 0.5, "update": 0.5, "zero": 0.75, "fixed": 0.125}
    assert {what: played.breakdown[what] for what in after} == pytest.approx(after)
    # A sixth of every pass is talk along tp.
    compute, talk = played.breakdown["compute"], played.breakdown["tp"]
    assert talk == pytest.approx((compute + talk) / 6)
    assert set(played.exposed) == {"tp", "pp", "dp", "zero"}


def test_transfers_that_a_software_waits_for_are_in_its_passes():
    """By hand: two ranks, three microbatches, a transfer of a quarter in every pass and between none."""
    plan = Plan(pp=2, dp=1, schedule="gpipe")
    played = simulate_step(parts_of(2, 3, transfer=0.25, overlaps_transfer=False), plan=plan)
    starts, ends = played.times(0)
    rows = [[(float(starts[cell]), float(ends[cell])) for cell in row] for row in played.order.rows]
    assert rows[0] == [(0.0, 1.25), (1.25, 2.5), (2.5, 3.75), (7.25, 9.5), (9.5, 11.75), (11.75, 14.0)]
    assert rows[1] == [(1.25, 2.5), (2.5, 3.75), (3.75, 5.0), (5.0, 7.25), (7.25, 9.5), (9.5, 11.75)]
    assert played.breakdown == pytest.approx({"compute": 12.0, "pp": 8 * 0.25}) and played.step_seconds == 14.0
    assert played.busy(0, 0) == played.busy(1, 0) == 3 * 3.5
    beside = simulate_step(parts_of(2, 3, transfer=0.25), plan=plan)
    assert beside.step_seconds == 12.0 + 2 * 0.25 and beside.busy(0, 0) == 9.0


times = st.floats(min_value=0.01, max_value=10.0)


@st.composite
def layouts(draw):
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "chimera", "dualpipev"]))
    pp = draw(st.sampled_from([2, 4])) if name != "1f1b" else draw(st.integers(1, 4))
    plan = Plan(
        pp=pp,
        dp=draw(st.integers(1, 3)),
        tp=draw(st.integers(1, 2)),
        cp=draw(st.integers(1, 2)),
        zero=draw(st.integers(0, 3)),
        schedule=name if pp > 1 else None,
    )
    schedule = schedule_for(plan, 2 * pp * draw(st.integers(1, 2)) + (4 if name == "dualpipev" else 0))
    stages = []
    for _ in range(schedule.grid.num_stages):
        forward, by_input, by_weight = draw(times), draw(times), draw(times)
        talk = draw(st.floats(0.0, 0.5)) * (forward + by_input + by_weight)
        stages.append(StageTimes(forward=forward, input=by_input, weight=by_weight, exposed={"tp": talk}))
    reduce, gather = draw(times), draw(times)
    parts = StepParts(
        stages=tuple(stages),
        microbatches=schedule.grid.num_microbatches,
        transfer=draw(st.floats(0.0, 1.0)),
        overlaps_transfer=draw(st.booleans()),
        reduce=reduce,
        reduce_hidden=reduce * draw(st.floats(0.0, 1.0)),
        gather=gather,
        gather_hidden=gather * draw(st.floats(0.0, 1.0)),
        update=draw(times),
        fixed=draw(times),
    )
    slow = draw(st.dictionaries(st.integers(0, plan.world_size - 1), st.floats(1.0, 4.0), max_size=3))
    return plan, schedule, parts, slow


def conditions_of(slow: dict[int, float]) -> Conditions:
    return Conditions(slow=tuple(Slow(index=rank, factor=factor) for rank, factor in slow.items()))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_folded_is_what_every_rank_written_out_gives(layout):
    plan, schedule, parts, slow = layout
    folded = simulate_step(parts, schedule, plan=plan, conditions=conditions_of(slow))
    every = simulate_step(parts, schedule, plan=plan, conditions=conditions_of(slow), every_replica=True)
    written = play_every_rank(parts, schedule, plan, slow)
    assert folded.step_seconds == pytest.approx(written, rel=1e-12)
    assert every.step_seconds == folded.step_seconds
    assert folded.bubble == pytest.approx(every.bubble, abs=1e-9)
    assert every.num_groups == plan.dp and folded.num_groups <= len(slow) + 1


@settings(max_examples=40, deadline=None)
@given(layouts(), st.data())
def test_a_step_is_never_shorter_than_its_bounds_and_a_straggler_never_shortens_it(layout, data):
    plan, schedule, parts, slow = layout
    played = simulate_step(parts, schedule, plan=plan, conditions=conditions_of(slow))
    plain = simulate_step(parts, schedule, plan=plan)
    busiest = max(played.busy(place, group) for place in range(plan.pp) for group in range(played.num_groups))
    through = sum(stage.forward + stage.input for stage in parts.stages)
    room = 1 - 1e-12
    assert played.step_seconds >= (busiest + parts.after_pipeline) * room
    assert played.step_seconds >= (through + parts.after_pipeline) * room
    assert played.step_seconds >= plain.step_seconds * room
    rank = data.draw(st.integers(0, plan.world_size - 1))
    slower = slow | {rank: slow.get(rank, 1.0) * 1.5}
    assert (
        simulate_step(parts, schedule, plan=plan, conditions=conditions_of(slower)).step_seconds
        >= played.step_seconds * room
    )


def test_a_straggler_puts_its_replica_in_a_group_of_its_own():
    plan = Plan(pp=2, dp=4, tp=2)
    slow = Conditions(slow=(Slow(index=11, factor=2.0),))  # pp 1, dp 1
    played = simulate_step(parts_of(2, 4), plan=plan, conditions=slow)
    assert played.folded.groups == ((0, 2, 3), (1,))
    assert played.ranks(1, 1) == [10, 11] and played.ranks(0, 0) == [0, 1, 4, 5, 6, 7]
    assert played.ends.decides == (0, 1) or played.ends.decides[1] == 1


def test_a_slow_pipeline_place_slows_all_replicas_alike():
    plan = Plan(pp=2, dp=3)
    played = simulate_step(
        parts_of(2, 4), plan=plan, conditions=Conditions(slow=(Slow(axis=Axis.PIPELINE, index=1, factor=2.0),))
    )
    assert played.num_groups == 1
    # Rank 0's first forward, four passes of the slow rank, rank 0's last backward.
    assert played.step_seconds == 1.0 + 4 * 6.0 + 2.0


def test_ten_thousand_devices_are_played_as_one_pipeline():
    plan = Plan(pp=10, dp=125, tp=8, zero=1)
    played = simulate_step(parts_of(10, 64, talk=0.2, transfer=0.1, **COLLECTIVES), plan=plan)
    assert plan.world_size == 10_000 and played.num_groups == 1
    assert sum(len(played.ranks(place, 0)) for place in range(10)) == 10_000
    small = simulate_step(parts_of(10, 64, talk=0.2, transfer=0.1, **COLLECTIVES), plan=Plan(pp=10, dp=2, tp=8, zero=1))
    assert played.step_seconds == small.step_seconds


def test_steps_with_jitter_are_those_that_are_played_one_by_one():
    plan = Plan(pp=2, dp=3, tp=2)
    parts = parts_of(2, 4, talk=0.5, transfer=0.2, **COLLECTIVES)
    drawn = Conditions(jitter=0.1, link_jitter=0.3, seed=7, slow=(Slow(index=4, factor=1.25),))
    many = step_times(parts, plan=plan, conditions=drawn, num_steps=6)
    alone = [simulate_step(parts, plan=plan, conditions=drawn, step=step).step_seconds for step in range(6)]
    assert many.tolist() == alone and len(set(alone)) == 6
    assert step_times(parts, plan=plan, conditions=drawn, num_steps=3).tolist() == alone[:3]
    assert step_times(parts, plan=plan, conditions=Conditions(jitter=0.1, seed=8), num_steps=1)[0] != alone[0]


def test_a_step_with_jitter_takes_as_long_as_the_slowest_of_its_ranks_in_the_mean():
    """The largest of n exponential draws is the harmonic number H_n in the mean: David and Nagaraja, Order Statistics, 4.6.1."""
    plan, num_steps = Plan(dp=64), 4000
    seconds = step_times(parts_of(1, 1), plan=plan, conditions=Conditions(jitter=0.1), num_steps=num_steps)
    harmonic = sum(1 / count for count in range(1, 65))
    expected = 3.0 * (1 + 0.1 * harmonic)
    error = 3.0 * 0.1 * np.sqrt(sum(1 / count**2 for count in range(1, 65)) / num_steps)
    assert abs(seconds.mean() - expected) < 5 * error
    assert abs(seconds.mean() - 3.0 * 1.1) > 5 * error


def test_draws_belong_to_the_rank():
    one, other = (factors_of(Plan(dp=4), Conditions(jitter=0.5, seed=seed), step=2) for seed in (1, 2))
    again = factors_of(Plan(dp=4), Conditions(jitter=0.5, seed=1), step=2)
    assert (one.compute == again.compute).all() and (one.compute != other.compute).all()
    assert (one.compute > 1).all() and (one.links == 1).all()


@pytest.mark.parametrize(
    ("slow", "message"),
    [
        (Slow(index=8, factor=2.0), "rank 8 x 2: plan 'dp=2 tp=2 pp=2' has 8 ranks, 0 to 7"),
        (Slow(index=-1, factor=2.0), "0 to 7"),
        (Slow(axis=Axis.PIPELINE, index=2, factor=2.0), "pp=2 x 2: plan 'dp=2 tp=2 pp=2' has 2 ranks along pp, 0 to 1"),
        (Slow(index=0, factor=0.0), "rank 0 x 0: a factor must be above 0"),
        (Slow(index=0, factor=float("nan")), "above 0"),
    ],
)
def test_ranks_that_are_not_there_and_factors_that_cannot_be_are_refused(slow, message):
    with pytest.raises(RequestError, match=message):
        simulate_step(parts_of(2, 4), plan=Plan(pp=2, dp=2, tp=2), conditions=Conditions(slow=(slow,)))


def test_parts_of_another_plan_are_refused():
    with pytest.raises(RequestError, match="the step has 4 stages, and schedule 1f1b is for 2"):
        simulate_step(parts_of(4, 4), plan=Plan(pp=2, dp=1))
    with pytest.raises(RequestError, match="parameter servers"):
        simulate_step(parts_of(1, 1), plan=Plan(ps=1, workers=2))
    with pytest.raises(RequestError, match=r"jitter is -0\.1"):
        Conditions(jitter=-0.1)
