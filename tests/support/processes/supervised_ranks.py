"""Ranks under the real supervisor, for the tests of what it does: a body of Python per rank, and what became of it."""

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from shoal.core.clock import Deadline
from shoal.launch.blame import Outcome
from shoal.launch.config import ProcessConfig
from shoal.launch.group.request import LaunchRequest
from shoal.launch.ranks import supervise
from shoal.telemetry.statusboard import StatusReading
from support.processes import warm

PRELUDE = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from shoal.comm.parentdeath import die_with_parent
from shoal.launch.errorreport import ErrorReport, write_report
from shoal.telemetry.statusboard import StatusBoard, Heartbeat

die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
run_dir = Path(os.environ["SHOAL_RUN_DIR"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ["SHOAL_GENERATION"])
board = StatusBoard.attach(int(os.environ["SHOAL_BOARD_FD"]), size)
rank_status = board.of_rank(rank)
heart = Heartbeat(rank_status, every=0.05)

def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            os._exit(99)
        time.sleep(0.005)

def fail(cause, peer_failure=False, code=1):
    try:
        if callable(cause):
            cause()
        raise cause
    except Exception as raised:
        where = rank_status.read()
        report = ErrorReport.of(raised, rank=rank, step=where.step, phase=where.phase, peer_failure=peer_failure)
        write_report(run_dir, report)
    os._exit(code)

def for_ever():
    until(lambda: False, seconds=30.0)

"""
LAST_WORD = "\nrank_status.finish('completed')\n"


class Recorder:
    """A display that keeps what it is shown, and can act on what it sees: that is how tests strike at an exact moment."""

    def __init__(self, on_update: Callable[[Sequence[StatusReading]], None] | None = None) -> None:
        self.messages: list[str] = []
        self.is_closed = False
        self._on_update = on_update

    @property
    def text(self) -> str:
        return "\n".join(self.messages)

    def update(self, states: Sequence[StatusReading]) -> None:
        if self._on_update is not None:
            self._on_update(states)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        self.is_closed = True


def once(
    ready: Callable[[Sequence[StatusReading]], bool], act: Callable[[Sequence[StatusReading]], None]
) -> Callable[[Sequence[StatusReading]], None]:
    done: list[bool] = []

    def look(states: Sequence[StatusReading]) -> None:
        if not done and ready(states):
            done.append(True)
            act(states)

    return look


def all_in(phase: str) -> Callable[[Sequence[StatusReading]], bool]:
    return lambda states: all(state.phase == phase for state in states)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    # The session's own process to fork from stays when it was started once, by whichever test comes first.
    warm.can_fork(os.environ)
    fds, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    children = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) == children
    assert set(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


def make_request(
    folder: Path,
    body: str,
    display: Recorder,
    *,
    num_ranks: int = 2,
    env: dict[str, str] | None = None,
    **deadlines: float,
) -> LaunchRequest:
    worker = folder / "worker.py"
    worker.write_text(PRELUDE + textwrap.dedent(body) + LAST_WORD)
    return LaunchRequest(
        argv=[sys.executable, str(worker)],
        num_ranks=num_ranks,
        run_dir=folder / "run",
        run_id="test",
        display=display,
        config=ProcessConfig.model_validate({"heartbeat_deadline": 10.0, "stop_grace": 10.0, **deadlines}),
        env=env or {},
    )


def run(folder: Path, body: str, display: Recorder | None = None, **options: object) -> Outcome:
    recorder = display or Recorder()
    outcome = supervise(make_request(folder, body, recorder, **options))  # type: ignore[arg-type]
    assert recorder.is_closed
    return outcome


def assert_gone(pids: Sequence[int], deadline: Deadline) -> None:
    while any(is_alive(pid) for pid in pids):
        deadline.check(f"the end of processes {[pid for pid in pids if is_alive(pid)]}")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
