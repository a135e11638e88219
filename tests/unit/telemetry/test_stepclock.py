"""The clock of a rank's steps: phases are the whole step, waits are those of the step, and spans are of chosen steps only."""

import json
import time

import pytest

from shoal.comm.trafficcounter import TrafficCounter, waiting
from shoal.core.events import StepDone
from shoal.telemetry.eventlog import decode_events, encode_event
from shoal.telemetry.measurements import (
    MEASUREMENTS,
    AxisTraffic,
    ExchangeMeasured,
    Forecast,
    QueuesMeasured,
    RankLocation,
    Spans,
    WorkDone,
)
from shoal.telemetry.statusboard import StatusBoard
from shoal.telemetry.stepclock import MOST_SPANS, StepClock
from support.processes.instruction_count import instructions

SECONDS = 0.02


def spend():
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        pass


@pytest.fixture
def clock():
    made = StepClock(None, spans_every=4)
    made.counter = TrafficCounter()
    made.follow(made.counter)
    return made


def take_step(clock, step):
    clock.begin(step)
    spend()
    clock.loaded()
    clock.enter("forward", step)
    spend()
    clock.enter("wait: gradients of the other ranks", step)
    with clock.counter.call("replicas", "all_reduce", 40):
        spend()
        with waiting():
            spend()
    clock.enter("gradient norm", step)
    return clock.end()


def test_phases_waits_and_data_of_a_step(clock):
    found = take_step(clock, 1)
    assert set(found.phases) == {"data", "other", "forward", "gradients", "norm"}
    assert sum(found.phases.values()) == pytest.approx(found.seconds, abs=1e-5)
    assert found.data_seconds == pytest.approx(found.phases["data"], abs=1e-6)
    assert found.data_seconds >= SECONDS
    assert found.phases["gradients"] >= 2 * SECONDS
    assert SECONDS <= found.wait_seconds["replicas"] <= found.phases["gradients"] - SECONDS, (
        "its own work is no waiting"
    )


def test_what_happens_between_two_steps_is_in_neither(clock):
    take_step(clock, 1)
    clock.enter("checkpoint", 1)
    with clock.counter.call("everyone", "all_reduce", 8), waiting():
        spend()
    found = take_step(clock, 2)
    assert "everyone" not in found.wait_seconds and "checkpoint" not in found.phases
    assert sum(found.phases.values()) == pytest.approx(found.seconds, abs=1e-5)


def test_in_a_loop_that_is_not_ours_a_step_is_all_since_the_last(clock):
    clock.restart_for(1)
    clock.leave("script")
    spend()
    with clock.loading():
        spend()
    clock.enter("forward", 1)
    clock.leave("script")
    found = clock.end()
    assert SECONDS <= found.data_seconds < found.seconds - SECONDS
    assert found.phases["script"] >= SECONDS
    clock.restart_for(2)
    assert "forward" not in clock.end().phases


def test_the_supervisor_sees_what_it_always_saw():
    board = StatusBoard.create(1)
    try:
        clock = StepClock(board.of_rank(0))
        clock.begin(7)
        assert (board.of_rank(0).read().phase, board.of_rank(0).read().step) == ("data", 7)
        clock.enter("wait: gradients of the other ranks", 7)
        assert board.of_rank(0).read().phase == "wait: gradients of the other ranks"
        clock.leave("script")
        assert (board.of_rank(0).read().phase, board.of_rank(0).read().step) == ("script", 7)
    finally:
        board.close()


def test_spans_are_of_the_second_step_and_of_multiples(clock):
    found = {}
    for step in range(1, 9):
        take_step(clock, step)
        found[step] = clock.take_spans(step)
    assert [step for step, spans in found.items() if spans is not None] == [2, 4, 8]
    spans = found[4]
    assert [row[:2] for row in spans.spans] == [
        ("data", "data"),
        ("phase", "other"),
        ("phase", "forward"),
        ("phase", "gradients"),
        ("comm", "replicas all_reduce"),
        ("phase", "norm"),
    ]
    assert spans.spans[4][4] == 40
    assert clock.counter.crossed is None, "nothing is kept of steps that were not chosen"


def test_a_step_of_too_many_spans_says_how_many_were_left_out(clock):
    clock.begin(4)
    for _ in range(MOST_SPANS + 5):
        clock.counter.spent("tp", "all_reduce", started_ns=1, ended_ns=2, waited_ns=0)
    clock.end()
    spans = clock.take_spans(4)
    assert (len(spans.spans), spans.left_out) == (MOST_SPANS, 6), "these, and the step's own phase"


def test_steps_that_cannot_be_told_apart_share_their_time(clock):
    clock.begin(1, 4)
    spend()
    clock.loaded()
    whole = clock.end()
    each = whole.share(4)
    assert each.seconds == pytest.approx(whole.seconds / 4)
    assert each.phases["data"] == pytest.approx(whole.phases["data"] / 4, abs=1e-6)
    assert clock.take_spans(4, num_steps=4).num_steps == 4, "one of them was chosen"


def test_a_step_costs_a_bounded_number_of_instructions(clock):
    """The loop may add 0.5 ms to a step (``benchmarks/overhead``); instructions are as many on a busy machine."""

    def step():
        clock.begin(3)
        clock.loaded()
        for phase in ("forward", "backward", "gradient norm", "optimizer"):
            clock.enter(phase, 3)
        with clock.counter.call("replicas", "all_reduce", 40):
            pass
        clock.end()
        clock.take_spans(3)

    step()
    assert instructions(step) < 1500


OLD_STEP = (
    b'{"t": 1.5, "rank": 0, "kind": "step", "step": 3, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "samples": 4, "tokens": 32, '
    b'"seconds": 0.5, "data_seconds": 0.1, "skipped": false, "loss_scale": 1.0}'
)


def test_files_of_earlier_releases_are_read_as_before():
    (found,) = decode_events([OLD_STEP])
    assert "wait_seconds" not in found and found["step"] == 3
    # And a reader of today's fields takes what is missing for nothing.
    values = {key: value for key, value in found.items() if key not in ("t", "rank", "kind")}
    done = StepDone(**values)
    assert (dict(done.wait_seconds), dict(done.phases)) == ({}, {})


KINDS = ("spans", "work", "queues", "exchange", "axis_traffic", "placed", "forecast")


def test_new_events_are_read_back_and_torn_ones_are_passed_over():
    events = [
        Spans(step=2, begin=10.0, spans=[("cell", "2F0", 0.0, 0.5, 0)]),
        WorkDone(step=2, samples=4, seconds=0.5, data_seconds=0.1, wait_seconds={"workers": 0.2}, phases={"take": 0.2}),
        QueuesMeasured(step=2, todo=1, in_hand=2, waiting=0, unapplied=3),
        ExchangeMeasured(step=2, sent_bytes=10, dense_bytes=40, residual_norm=0.5),
        AxisTraffic(step=2, rows={"dp all_reduce": [1, 8, 0.5]}),
        RankLocation(host="a", device="cpu", local_rank=0, coordinates={"dp": 1}, threads=1, pid=7),
        Forecast(source="layout", bubble=None, memory_bytes={"0": {"weights": 5}}),
    ]
    assert {type(event) for event in events} == set(MEASUREMENTS)
    lines = [encode_event(event, rank=0, wall_time=1.0) for event in events]
    assert [event["kind"] for event in decode_events(lines)] == list(KINDS)
    assert [dict(event.as_dict()) for event in events] == [
        {
            key: value if key != "spans" else [tuple(row) for row in value]
            for key, value in json.loads(line).items()
            if key not in ("t", "rank")
        }
        for line in lines
    ]
    assert list(decode_events([line[: len(line) // 2] for line in lines])) == []
    assert list(decode_events([b'{"t": 1.0, "kind": "spans", "step": "two", "begin": 1.0, "spans": []}'])) == []
