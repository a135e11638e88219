"""A played step as a trace and as a picture: complete, to scale, and such that Perfetto and browsers can read them."""

import json
import xml.etree.ElementTree as xml
from collections import defaultdict
from itertools import pairwise

import pytest

from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.cells import RankBytes, StepBytes
from shoal.planner.simulation.conditions import Conditions, Slow
from shoal.planner.simulation.result import SimulatedStep
from shoal.planner.simulation.step import schedule_for, simulate_step
from shoal.planner.simulation.trace import Stream, draw_step, format_ranks, streams_of, write_trace

SPACE = "{http://www.w3.org/2000/svg}"
PLAN = Plan(pp=2, dp=4, tp=2, zero=1)


def step(plan: Plan = PLAN, *, slow: tuple[Slow, ...] = (), transfer: float = 0.25) -> SimulatedStep:
    stages = schedule_for(plan, 4).grid.num_stages
    parts = StepParts(
        stages=(StageTimes(forward=1.0, input=1.25, weight=0.75, exposed={"tp": 0.5}),) * stages,
        microbatches=4,
        transfer=transfer,
        reduce=2.0,
        reduce_hidden=1.5,
        gather=1.0,
        gather_hidden=0.25,
        update=0.5,
        fixed=0.125,
    )
    needed = StepBytes(places=(RankBytes(weights=100.0),) * plan.pp, activations=(10.0,) * stages)
    return simulate_step(parts, plan=plan, conditions=Conditions(slow=slow), needed=needed)


def trace_of(simulated: SimulatedStep, path, **options) -> list[dict]:
    write_trace(path, simulated, **options)
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_a_trace_has_every_cell_once_and_no_slices_that_overlap_on_a_thread(tmp_path, name, zero):
    plan = Plan(pp=2, dp=2, schedule=name, zero=zero)
    simulated = step(plan)
    events = trace_of(simulated, tmp_path / "t.json")
    slices = [event for event in events if event["ph"] == "X"]
    cells = sorted(event["name"] for event in slices if event["cat"] == "compute" and "args" in event)
    wanted = sorted("&".join(map(str, cell)) for row in simulated.order.schedule.rows for cell in row)
    assert cells == wanted
    threads = defaultdict(list)
    for event in slices:
        assert event["dur"] > 0 and 0 <= event["ts"] <= simulated.step_seconds * 1e6 + 1e-3
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-6
    assert max(end for spans in threads.values() for _, end in spans) == pytest.approx(simulated.step_seconds * 1e6)
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {"compute", "tp", "pp", "dp", "zero"}


def test_transfers_may_overlap_and_are_begun_and_ended_in_pairs(tmp_path):
    events = trace_of(step(transfer=5.0), tmp_path / "t.json")
    begun = {(event["pid"], event["id2"]["local"]): event["ts"] for event in events if event["ph"] == "b"}
    ended = {(event["pid"], event["id2"]["local"]): event["ts"] for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys() and len(begun) == 8
    assert all(ended[key] - begun[key] == pytest.approx(5e6) for key in begun)


def test_memory_is_a_counter(tmp_path):
    held = [event["args"]["bytes"] for event in trace_of(step(), tmp_path / "t.json") if event["ph"] == "C"]
    assert max(held) == 120.0 and min(held) == 100.0


def test_ranks_that_are_alike_share_a_lane_until_they_are_asked_for(tmp_path):
    slow = (Slow(index=5, factor=2.0),)
    lanes = list(streams_of(step(slow=slow)))
    assert sorted((lane.place, lane.ranks) for lane in lanes) == [
        (0, (0, 1, 2, 3, 6, 7)),
        (0, (4, 5)),
        (1, (8, 9, 10, 11, 14, 15)),
        (1, (12, 13)),
    ]
    every = list(streams_of(step(slow=slow), expand=True))
    assert sorted(lane.ranks[0] for lane in every) == list(range(16))
    by_rank = {lane.ranks[0]: lane.spans for lane in every}
    assert by_rank[4] == by_rank[5] != by_rank[6] == by_rank[0]
    pids = {event["pid"] for event in trace_of(step(slow=slow), tmp_path / "t.json", expand=True)}
    assert pids == set(range(16))


def test_where_lanes_are_left_out_those_that_all_wait_for_stay():
    slow = tuple(Slow(index=2 * replica, factor=1.0 + replica / 4) for replica in range(4))
    lanes = list(streams_of(step(slow=slow), most=2))
    assert [lane.ranks for lane in lanes] == [(6, 7), (14, 15)]


def test_the_sum_goes_on_beside_the_last_backward_pass():
    lane = next(streams_of(step()))
    reduce = next(span for span in lane.spans if span.stream is Stream.DATA)
    last = max(span.end for span in lane.spans if span.stream is Stream.TENSOR)
    assert reduce.end - reduce.start == pytest.approx(2.0) and last - reduce.start == pytest.approx(1.5)


def test_the_picture_is_well_formed_to_scale_and_within_its_frame():
    simulated = step(slow=(Slow(index=5, factor=2.0),))
    root = xml.fromstring(draw_step(simulated))
    width, height = float(root.get("width")), float(root.get("height"))
    tips, right = [], 0.0
    for group in root.iter(f"{SPACE}g"):
        outline = group.findall(f"{SPACE}rect")[-1]
        left, wide = float(outline.get("x")), float(outline.get("width"))
        assert left >= 0 and left + wide <= width and float(outline.get("y")) + 22 <= height
        right = max(right, left + wide)
        tips.append(group.findtext(f"{SPACE}title"))
    assert len(tips) == sum(len(lane.spans) for lane in streams_of(simulated))
    assert any(tip.startswith("reduce: ") for tip in tips) and any(tip.startswith("0F0 (forward") for tip in tips)
    labels = [text.text for text in root.findall(f"{SPACE}text")]
    assert "ranks 4-5 compute" in labels and "dp: sum of gradients" in labels and "the update" in labels
    assert "ranks 4-5 tp" in labels and "tp: in a pass" in labels and "cp: in a pass" not in labels
    assert "on 16 ranks" in labels[0]


def test_a_picture_of_a_long_step_stays_a_picture():
    plan = Plan(pp=16, dp=64)
    parts = StepParts(stages=(StageTimes(forward=1.0, input=1.0, weight=1.0),) * 16, microbatches=128, transfer=1e-6)
    root = xml.fromstring(draw_step(simulate_step(parts, plan=plan)))
    assert float(root.get("width")) < 21_000


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(RunError, match="cannot write the trace"):
        write_trace(tmp_path / "no" / "t.json", step())


def test_ranks_in_few_letters():
    assert format_ranks([3]) == "3" and format_ranks([0, 1, 2, 8, 9, 12]) == "0-2, 8-9, 12"
    assert format_ranks(range(0, 20, 2)) == "0, 2, 4, ..."
