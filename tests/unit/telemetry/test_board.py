"""The board between real processes, and what a reader makes of a slot whose writer died in the middle of a write."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.telemetry.board import METRICS_BYTES, Board, Heartbeat
from support.processes.instruction_count import instructions


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(3)
    yield made
    made.close()


def test_empty_slot(board: Board) -> None:
    state = board.slot(1).read()
    assert (state.rank, state.pid, state.heartbeat, state.step, state.phase, state.phase_count) == (
        1,
        0,
        None,
        0,
        "",
        0,
    )
    assert state.metrics == {}


def test_slots_do_not_touch_each_other(board: Board) -> None:
    for rank in range(3):
        board.slot(rank).enter(f"phase {rank} " + "x" * 200, rank + 10)
        assert board.slot(rank).publish({"rank": rank, "padding": "p" * (METRICS_BYTES - 40)})
    states = board.read()
    assert [state.step for state in states] == [10, 11, 12]
    assert [state.phase[:8] for state in states] == ["phase 0 ", "phase 1 ", "phase 2 "]
    assert [state.metrics["rank"] for state in states] == [0, 1, 2]


def test_phase_counts_every_entry(board: Board) -> None:
    slot = board.slot(0)
    for step in range(5):
        slot.enter("forward", step)
    assert slot.read().phase_count == 5


def test_long_phase_is_cut_between_characters(board: Board) -> None:
    board.slot(0).enter("é" * 100, 1)
    assert board.slot(0).read().phase == "é" * 40


def test_metrics_that_do_not_fit_are_refused_and_the_old_ones_stay(board: Board) -> None:
    slot = board.slot(0)
    assert slot.publish({"loss": float("nan"), "what": object})
    assert not slot.publish({"big": "x" * METRICS_BYTES})
    metrics = slot.read().metrics
    assert metrics["loss"] != metrics["loss"]
    assert "big" not in metrics


def test_writer_killed_in_the_middle_leaves_a_readable_slot(board: Board) -> None:
    slot = board.slot(0)
    slot.enter("backward", 9)
    slot.publish({"loss": 1.0})
    slot._words[2] += 1  # phase sequence is odd: a write has begun
    slot._words[4] += 1  # metrics too
    state = slot.read()
    assert (state.step, state.phase, state.metrics) == (9, "backward", {})


def test_reader_survives_garbage(board: Board) -> None:
    slot = board.slot(0)
    slot._memory[: len(slot._memory)] = b"\xff" * len(slot._memory)
    assert slot.read().metrics == {}


CHILD = """
import os, sys
from shoal.telemetry.board import Board
board = Board.attach(int(sys.argv[1]), 3)
slot = board.slot(2)
slot.claim()
for step in range(20000):
    slot.enter("a" * 30 if step % 2 else "b" * 30, step)
    slot.publish({"step": step, "same": [step] * 20})
os._exit(0)
"""


def test_another_process_writes_and_no_read_is_torn(board: Board) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(board.fd)], pass_fds=(board.fd,))
    while child.poll() is None:
        state = board.slot(2).read()
        assert state.phase in ("", "a" * 30, "b" * 30)
        if state.metrics:
            assert state.metrics["same"] == [state.metrics["step"]] * 20
    assert child.returncode == 0
    state = board.slot(2).read()
    assert (state.pid, state.step, state.phase_count) == (child.pid, 19999, 20000)
    assert state.heartbeat is not None
    assert 0 <= time.monotonic() - state.heartbeat < 60


def test_attach_refuses_what_is_no_board(board: Board) -> None:
    with pytest.raises(RunError, match="a board for 5 ranks"):
        Board.attach(board.fd, 5)
    with pytest.raises(RunError, match="is not the supervisor's board"):
        Board.attach(999, 3)


def test_close_gives_back_the_descriptor_and_may_be_called_twice() -> None:
    before = set(os.listdir("/proc/self/fd"))
    board = Board.create(2)
    assert set(os.listdir("/proc/self/fd")) != before
    board.close()
    board.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_heartbeat_beats_until_it_is_stopped(board: Board) -> None:
    slot = board.slot(1)
    with Heartbeat(slot, every=0.01):
        first = slot.read()
        assert first.pid == os.getpid()
        deadline = Deadline(seconds=5)
        while slot.read().heartbeat == first.heartbeat:
            deadline.check("a second beat")
    last = slot.read().heartbeat
    time.sleep(0.05)
    assert slot.read().heartbeat == last


def test_saying_where_one_is_costs_next_to_nothing(board: Board) -> None:
    slot = board.slot(0)
    slot.enter("forward", 0)
    assert instructions(lambda: slot.enter("forward", 1)) < 100  # about 0.4 microseconds


def test_a_fork_has_no_say_and_cannot_go_on_as_its_parent() -> None:
    board = Board.create(1)
    slot = board.slot(0)
    slot.claim()
    slot.enter("forward", 3)
    child = os.fork()
    if child == 0:
        slot.finish("completed")
        try:
            slot.enter("backward", 3)
        except RunError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (slot.read().phase, slot.read().said) == ("forward", "")
    slot.finish("interrupted", heard=15)
    assert (slot.read().said, slot.read().heard) == ("interrupted", 15)
    # Another process in the same place has said nothing yet.
    slot.claim()
    assert (slot.read().said, slot.read().heard) == ("", 0)
    board.close()
