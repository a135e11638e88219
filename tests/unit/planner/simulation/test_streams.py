"""Streams of a played step: communication inside passes has its own, and showing it changes no number of the step."""

import itertools
import math

import pytest

from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.cells import RankBytes, StepBytes
from shoal.planner.simulation.conditions import Conditions, Slow
from shoal.planner.simulation.result import SimulatedStep
from shoal.planner.simulation.step import schedule_for, simulate_step
from shoal.planner.simulation.trace import RankStreams, Stream, streams_of

INSIDE = (Stream.TENSOR, Stream.CONTEXT, Stream.EXPERT)


def played(text: str, *, overlaps_transfer: bool = True, link_jitter: float = 0.0, **exposed: float) -> SimulatedStep:
    plan = Plan.parse(text)
    grid = schedule_for(plan, 4).grid
    stages = tuple(
        StageTimes(
            forward=1.0 + stage / 7, input=1.25, weight=0.7, exposed=exposed or {"tp": 0.5, "cp": 0.3, "ep": 0.1}
        )
        for stage in range(grid.num_stages)
    )
    parts = StepParts(
        stages=stages,
        microbatches=4,
        transfer=0.3,
        overlaps_transfer=overlaps_transfer,
        reduce=2.1,
        reduce_hidden=1.4,
        gather=1.1,
        gather_hidden=0.3,
        update=0.6,
        fixed=0.2,
    )
    needed = StepBytes(places=(RankBytes(weights=100.0),) * plan.pp, activations=(10.0,) * grid.num_stages)
    slow = Conditions(slow=(Slow(index=1, factor=1.3),), link_jitter=link_jitter, seed=3)
    return simulate_step(parts, plan=plan, conditions=slow, needed=needed)


def numbers(simulated: SimulatedStep) -> tuple[float, ...]:
    """What a step is summed up by: its length, its pipeline's, idle, busy, the path's sum, its compute, memory over time."""
    lanes = list(streams_of(simulated))
    return (
        simulated.step_seconds,
        simulated.makespan,
        simulated.bubble,
        math.fsum(
            simulated.busy(place, group)
            for place in range(simulated.num_places)
            for group in range(simulated.num_groups)
        ),
        math.fsum(simulated.breakdown.values()),
        simulated.breakdown["compute"],
        math.fsum(moment * held for lane in lanes for moment, held in lane.memory),
    )


BEFORE = {
    "dp=2 tp=2": (
        16.74,
        14.26,
        0.08625525946704082,
        26.059999999999995,
        16.74,
        10.66,
        10814.9,
    ),
    "dp=2 tp=2 pp=2 schedule=1f1b zero=1": (
        20.560714285714287,
        18.080714285714286,
        0.29755461620511214,
        50.802857142857135,
        20.560714285714287,
        12.380714285714287,
        28063.59273607748,
    ),
    "dp=2 cp=2 pp=2 schedule=zb-h1 zero=3": (
        19.160714285714285,
        16.680714285714284,
        0.2385988952168887,
        50.802857142857135,
        19.160714285714285,
        11.388104585945232,
        31998.508353510897,
    ),
    "dp=2 pp=2 schedule=interleaved": (
        34.574285714285715,
        32.09428571428571,
        0.17025727766402565,
        106.51999999999997,
        34.574285714285715,
        22.194285714285716,
        114887.39149976747,
    ),
    "dp=2 pp=2 schedule=dualpipev": (
        35.03357142857144,
        32.55357142857144,
        0.18064728469555713,
        106.69142857142856,
        35.03357142857144,
        23.051968565441864,
        113479.96908686507,
    ),
    "dp=2 pp=2 schedule=pipedream-2bw": (
        17.495714285714282,
        72.74785714285713,
        0.1497480796233578,
        117.64571428571432,
        17.495714285714286,
        9.715714285714284,
        241611.01295399514,
    ),
}
"""The numbers of these steps, to the bit, from when communication inside passes was drawn as compute."""


@pytest.mark.parametrize("text", BEFORE)
def test_what_is_drawn_on_streams_of_its_own_changes_no_number(text):
    assert numbers(played(text)) == BEFORE[text]


def inside(lane: RankStreams) -> list:
    return [span for span in lane.spans if span.cell is not None or span.name.startswith("in ")]


@pytest.mark.parametrize("overlaps_transfer", [True, False])
@pytest.mark.parametrize("text", BEFORE)
def test_a_cell_is_compute_and_then_what_it_waits_for(text, overlaps_transfer):
    """Without a gap, from its start to its end, to the bit; links that are slow make the waits longer."""
    simulated = played(text, overlaps_transfer=overlaps_transfer, link_jitter=0.2)
    for lane in streams_of(simulated):
        starts, ends = simulated.times(lane.group)
        spans = sorted(inside(lane), key=lambda span: (span.start, span.end))
        cells = [at for at, span in enumerate(spans) if span.cell is not None]
        row = simulated.order.rows[lane.place]
        assert len(cells) == len(row)
        for first, after, number in zip(cells, [*cells[1:], len(spans)], row, strict=True):
            own = spans[first:after]
            assert own[0].start == starts[number] and own[-1].end == ends[number]
            assert all(one.end == other.start for one, other in itertools.pairwise(own))
            assert len({span.stream for span in own}) == len(own) >= 4, "compute, tp, cp and ep"


def test_streams_add_up_to_what_is_exposed():
    """Of one microbatch in one stage by axis, on every rank; a straggler computes longer and talks as long."""
    simulated = played("dp=2 tp=2 pp=2 schedule=1f1b")
    for lane in streams_of(simulated):
        sums = dict.fromkeys(INSIDE, 0.0)
        for span in lane.spans:
            if span.stream in INSIDE:
                sums[span.stream] += span.end - span.start
        assert sums == pytest.approx({Stream.TENSOR: 4 * 0.5, Stream.CONTEXT: 4 * 0.3, Stream.EXPERT: 4 * 0.1})


def test_transfers_that_passes_wait_for_are_in_them():
    """And none goes on between passes."""
    lane = next(streams_of(played("dp=2 pp=2 schedule=1f1b", overlaps_transfer=False)))
    moved = [span for span in lane.spans if span.stream is Stream.PIPELINE]
    assert len(moved) == 8 and all(span.name.startswith("in ") for span in moved)
    assert sum(span.end - span.start for span in moved) == pytest.approx(8 * 0.3)


def test_axes_that_say_nothing_have_no_stream():
    streams = {span.stream for lane in streams_of(played("dp=2 tp=2", tp=0.5)) for span in lane.spans}
    assert streams & set(INSIDE) == {Stream.TENSOR}
