"""The board between real processes, and what a reader makes of a rank status whose writer died in the middle of a write."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.telemetry.statusboard import METRICS_BYTES, Heartbeat, StatusBoard
from support.processes.instruction_count import instructions


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    made = StatusBoard.create(3)
    yield made
    made.close()


def test_empty_slot(board: StatusBoard) -> None:
    state = board.of_rank(1).read()
    assert (state.rank, state.pid, state.heartbeat, state.step, state.phase, state.phase_count) == (
        1,
        0,
        None,
        0,
        "",
        0,
    )
    assert state.metrics == {}


def test_slots_do_not_touch_each_other(board: StatusBoard) -> None:
    for rank in range(3):
        board.of_rank(rank).enter(f"phase {rank} " + "x" * 200, rank + 10)
        assert board.of_rank(rank).publish({"rank": rank, "padding": "p" * (METRICS_BYTES - 40)})
    states = board.read()
    assert [state.step for state in states] == [10, 11, 12]
    assert [state.phase[:8] for state in states] == ["phase 0 ", "phase 1 ", "phase 2 "]
    assert [state.metrics["rank"] for state in states] == [0, 1, 2]


def test_phase_counts_every_entry(board: StatusBoard) -> None:
    rank_status = board.of_rank(0)
    for step in range(5):
        rank_status.enter("forward", step)
    assert rank_status.read().phase_count == 5


def test_long_phase_is_cut_between_characters(board: StatusBoard) -> None:
    board.of_rank(0).enter("é" * 100, 1)
    assert board.of_rank(0).read().phase == "é" * 40


def test_metrics_that_do_not_fit_are_refused_and_the_old_ones_stay(board: StatusBoard) -> None:
    rank_status = board.of_rank(0)
    assert rank_status.publish({"loss": float("nan"), "what": object})
    assert not rank_status.publish({"big": "x" * METRICS_BYTES})
    metrics = rank_status.read().metrics
    assert metrics["loss"] != metrics["loss"]
    assert "big" not in metrics


def test_writer_killed_in_the_middle_leaves_a_readable_slot(board: StatusBoard) -> None:
    rank_status = board.of_rank(0)
    rank_status.enter("backward", 9)
    rank_status.publish({"loss": 1.0})
    rank_status._words[2] += 1  # phase sequence is odd: a write has begun
    rank_status._words[4] += 1  # metrics too
    state = rank_status.read()
    assert (state.step, state.phase, state.metrics) == (9, "backward", {})


def test_reader_survives_garbage(board: StatusBoard) -> None:
    rank_status = board.of_rank(0)
    rank_status._memory[: len(rank_status._memory)] = b"\xff" * len(rank_status._memory)
    assert rank_status.read().metrics == {}


CHILD = """
import os, sys
from shoal.telemetry.statusboard import StatusBoard
board = StatusBoard.attach(int(sys.argv[1]), 3)
rank_status = board.of_rank(2)
rank_status.claim()
for step in range(20000):
    rank_status.enter("a" * 30 if step % 2 else "b" * 30, step)
    rank_status.publish({"step": step, "same": [step] * 20})
os._exit(0)
"""


def test_another_process_writes_and_no_read_is_torn(board: StatusBoard) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(board.fd)], pass_fds=(board.fd,))
    while child.poll() is None:
        state = board.of_rank(2).read()
        assert state.phase in ("", "a" * 30, "b" * 30)
        if state.metrics:
            assert state.metrics["same"] == [state.metrics["step"]] * 20
    assert child.returncode == 0
    state = board.of_rank(2).read()
    assert (state.pid, state.step, state.phase_count) == (child.pid, 19999, 20000)
    assert state.heartbeat is not None
    assert 0 <= time.monotonic() - state.heartbeat < 60


def test_attach_refuses_what_is_no_board(board: StatusBoard) -> None:
    with pytest.raises(RunError, match="a board for 5 ranks"):
        StatusBoard.attach(board.fd, 5)
    with pytest.raises(RunError, match="is not the supervisor's board"):
        StatusBoard.attach(999, 3)


def test_close_gives_back_the_descriptor_and_may_be_called_twice() -> None:
    before = set(os.listdir("/proc/self/fd"))
    board = StatusBoard.create(2)
    assert set(os.listdir("/proc/self/fd")) != before
    board.close()
    board.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_heartbeat_beats_until_it_is_stopped(board: StatusBoard) -> None:
    rank_status = board.of_rank(1)
    with Heartbeat(rank_status, every=0.01):
        first = rank_status.read()
        assert first.pid == os.getpid()
        deadline = Deadline(seconds=5)
        while rank_status.read().heartbeat == first.heartbeat:
            deadline.check("a second beat")
    last = rank_status.read().heartbeat
    time.sleep(0.05)
    assert rank_status.read().heartbeat == last


def test_saying_where_one_is_costs_next_to_nothing(board: StatusBoard) -> None:
    rank_status = board.of_rank(0)
    rank_status.enter("forward", 0)
    assert instructions(lambda: rank_status.enter("forward", 1)) < 100  # about 0.4 microseconds


def test_a_fork_has_no_say_and_cannot_go_on_as_its_parent() -> None:
    board = StatusBoard.create(1)
    rank_status = board.of_rank(0)
    rank_status.claim()
    rank_status.enter("forward", 3)
    child = os.fork()
    if child == 0:
        rank_status.finish("completed")
        try:
            rank_status.enter("backward", 3)
        except RunError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (rank_status.read().phase, rank_status.read().final_status) == ("forward", "")
    rank_status.finish("interrupted", stop_signal=15)
    assert (rank_status.read().final_status, rank_status.read().stop_signal) == ("interrupted", 15)
    # Another process in the same place has said nothing yet.
    rank_status.claim()
    assert (rank_status.read().final_status, rank_status.read().stop_signal) == ("", 0)
    board.close()
