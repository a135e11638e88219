"""The supervisor hears signals and stops its ranks in order, and starts them again when it may."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.launch.failurereport import describe
from shoal.launch.group.request import LaunchRequest
from shoal.launch.ranks import supervise
from shoal.telemetry.statusboard import StatusReading
from support.processes.command import wait_until
from support.processes.supervised_ranks import Recorder, all_in, once, run
from support.processes.supervised_ranks import nothing_left as nothing_left

ORDERLY = """
stopping = []
signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
rank_status.enter("train", 7)
until(lambda: stopping)
(run_dir / f"saved-{rank}").write_text("x")
rank_status.finish("interrupted", stop_signal=stopping[0])
sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_all_ranks_in_order(tmp_path: Path, number: signal.Signals) -> None:
    before = [signal.getsignal(caught) for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    display = Recorder(once(all_in("train"), lambda states: os.kill(os.getpid(), number)))
    outcome = run(tmp_path, ORDERLY, display)
    assert (outcome.status, outcome.signal, outcome.was_forced) == ("interrupted", number, False)
    assert outcome.exit_code == 128 + number
    assert outcome.culprit is None
    assert (tmp_path / "run/saved-0").exists()
    assert (tmp_path / "run/saved-1").exists()
    assert [signal.getsignal(caught) for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_ranks_that_stop_by_themselves_are_an_interruption_without_signal(tmp_path: Path) -> None:
    outcome = run(tmp_path, "rank_status.finish('interrupted'); sys.exit(3)")
    assert (outcome.status, outcome.signal, outcome.exit_code) == ("interrupted", None, 0)


def test_a_signal_to_one_rank_alone_is_an_interruption_by_that_signal(tmp_path: Path) -> None:
    display = Recorder(once(all_in("train"), lambda states: [os.kill(state.pid, signal.SIGTERM) for state in states]))
    outcome = run(tmp_path, ORDERLY, display)
    assert (outcome.status, outcome.signal, outcome.signalled_rank, outcome.exit_code) == ("interrupted", 15, 0, 143)


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank_status.enter("train", 7)
for_ever()
"""


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    display = Recorder(once(all_in("train"), lambda states: os.kill(os.getpid(), signal.SIGTERM)))
    began = time.monotonic()
    outcome = run(tmp_path, STUBBORN, display, stop_grace=0.7)
    assert 0.7 < time.monotonic() - began < 5.0
    assert (outcome.status, outcome.was_forced, outcome.exit_code) == ("interrupted", True, 143)


def test_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    strikes: list[float] = []

    def strike(states: Sequence[StatusReading]) -> None:
        asked = "finishing the step" in display.text
        if (not strikes and all_in("train")(states)) or (len(strikes) == 1 and asked):
            strikes.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    display = Recorder(strike)
    outcome = run(tmp_path, STUBBORN, display, stop_grace=20.0)
    assert len(strikes) == 2
    assert time.monotonic() - strikes[1] < 2.0
    assert (outcome.status, outcome.signal, outcome.was_forced) == ("interrupted", signal.SIGINT, True)


def test_failure_while_stopping_is_told(tmp_path: Path) -> None:
    body = """
    stopping = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    rank_status.enter("train", 7)
    until(lambda: stopping)
    fail(OSError("disk full")) if rank == 1 else for_ever()
    """
    display = Recorder(once(all_in("train"), lambda states: os.kill(os.getpid(), signal.SIGTERM)))
    outcome = run(tmp_path, body, display)
    assert outcome.status == "interrupted"
    assert outcome.culprit is not None
    assert "disk full" in describe(outcome.culprit)


def test_restart_has_a_new_generation_and_a_new_store(tmp_path: Path) -> None:
    body = """
    with (run_dir / f"starts-{rank}").open("a") as file:
        print(generation, os.stat(os.environ["SHOAL_STORE"]).st_ino, os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
    rank_status.enter("train", 4)
    if generation < 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if generation < 2:
        for_ever()
    """
    display = Recorder()
    outcome = run(tmp_path, body, display, max_restarts=3)
    assert (outcome.status, outcome.restarts) == ("completed", 2)
    starts = [line.split() for line in (tmp_path / "run/starts-1").read_text().splitlines()]
    assert [start[0] for start in starts] == [start[2] for start in starts] == ["0", "1", "2"]
    assert len({start[1] for start in starts}) == 3
    events = [json.loads(line) for line in (tmp_path / "run/events/supervisor.jsonl").read_text().splitlines()]
    assert [(event["generation"], event["restarting"]) for event in events] == [(0, True), (1, True)]
    assert display.text.count("killed by signal 9 (SIGKILL)") == 2


def test_restarts_are_given_up_after_n(tmp_path: Path) -> None:
    body = """
    rank_status.enter("train", generation)
    fail(ValueError(f"generation {generation}")) if rank == 0 else for_ever()
    """
    outcome = run(tmp_path, body, max_restarts=2)
    assert (outcome.status, outcome.restarts) == ("failed", 2)
    assert outcome.culprit is not None
    assert outcome.culprit.cause == "ValueError: generation 2"


def test_report_of_an_earlier_generation_is_forgotten(tmp_path: Path) -> None:
    body = 'fail(ValueError("old")) if generation == 0 else os._exit(7)'
    outcome = run(tmp_path, body, max_restarts=1)
    assert outcome.culprit is not None
    assert outcome.culprit.cause == "exit code 7, without a report"


def test_signal_between_generations_ends_the_run(tmp_path: Path) -> None:
    class Striking(Recorder):
        def message(self, text: str) -> None:
            super().message(text)
            if "starting all ranks again" in text:
                os.kill(os.getpid(), signal.SIGTERM)

    body = 'fail(ValueError("x")) if generation == 0 else for_ever()'
    outcome = run(tmp_path, body, Striking(), max_restarts=5)
    assert (outcome.status, outcome.signal, outcome.restarts) == ("interrupted", signal.SIGTERM, 1)


SLOW = """
import signal
from pathlib import Path

Path(__file__).with_suffix(".importing").touch()
signal.pause()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are forked on Linux only")
def test_signal_before_the_first_rank_is_there_starts_none(tmp_path: Path) -> None:
    """Ranks are forked from a process that imports for seconds, and Ctrl-C does not wait for that."""
    (tmp_path / "slow_worker.py").write_text(SLOW)

    def strike() -> None:
        wait_until((tmp_path / "slow_worker.importing").exists, "the import to begin")
        os.kill(os.getpid(), signal.SIGTERM)

    request = LaunchRequest(
        module="slow_worker",
        num_ranks=2,
        run_dir=tmp_path / "run",
        run_id="test",
        display=Recorder(),
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    striking = threading.Thread(target=strike)
    striking.start()
    outcome = supervise(request)
    striking.join()
    assert (outcome.status, outcome.exit_code, outcome.culprit, outcome.was_forced) == ("interrupted", 143, None, False)
    assert not (tmp_path / "run" / "logs").exists()
