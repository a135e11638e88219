"""The supervisor names who failed, and how."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.launch.config import ProcessConfig
from shoal.launch.failurereport import describe
from shoal.launch.group.request import LaunchRequest
from shoal.launch.ranks import supervise
from shoal.telemetry.statusboard import StatusReading
from support.processes.supervised_ranks import Recorder, once, run
from support.processes.supervised_ranks import nothing_left as nothing_left


def test_success(tmp_path: Path) -> None:
    display = Recorder()
    outcome = run(tmp_path, 'print("done", rank); print("aside", file=sys.stderr)', display, num_ranks=3)
    assert outcome.status == "completed"
    assert outcome.exit_code == 0
    lines = display.text.splitlines()
    assert "done 0" in lines
    assert "[rank 1] done 1" in lines
    assert "[rank 0] aside" in lines
    assert "done 2" in (tmp_path / "run/logs/rank-002.log").read_text()


def test_environment_is_torchruns(tmp_path: Path) -> None:
    body = """
    import json
    (run_dir / f"env-{rank}.json").write_text(json.dumps(dict(os.environ)))
    """
    run(tmp_path, body, env={"EXTRA": "1"})
    first, second = (json.loads((tmp_path / f"run/env-{rank}.json").read_text()) for rank in (0, 1))
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
    assert second["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert (second["GROUP_RANK"], second["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0")
    assert (second["TORCHELASTIC_RUN_ID"], second["OMP_NUM_THREADS"], second["EXTRA"]) == ("test", "1", "1")
    assert second["GLOO_SOCKET_IFNAME"] == "lo"
    assert first["SHOAL_SUPERVISOR_PID"] == str(os.getpid())
    assert first["SHOAL_STORE"] == second["SHOAL_STORE"]
    # A program that meets by torchrun's address would wait for a store that nobody serves.
    assert not {"MASTER_ADDR", "MASTER_PORT"} & set(first)


def test_kill_9_of_a_rank_is_named(tmp_path: Path) -> None:
    body = """
    rank_status.enter("backward" if rank == 1 else "wait: gradients", 12)
    for_ever()
    """
    killed_at: list[float] = []

    def kill(states: Sequence[StatusReading]) -> None:
        killed_at.append(time.monotonic())
        os.kill(states[1].pid, signal.SIGKILL)

    display = Recorder(once(lambda states: all(state.step == 12 for state in states), kill))
    outcome = run(tmp_path, body, display)
    assert time.monotonic() - killed_at[0] < 3.0
    culprit = outcome.culprit
    assert outcome.status == "failed"
    assert outcome.exit_code == 1
    assert culprit is not None
    assert (culprit.rank, culprit.step, culprit.phase, culprit.signal) == (1, 12, "backward", signal.SIGKILL)
    text = describe(culprit)
    assert text.startswith("rank 1 failed at step 12 in phase 'backward': killed by signal 9 (SIGKILL)\n")
    assert "last known memory of rank 1" in text
    assert "rank 0 was at step 12 in phase 'wait: gradients'" in text
    event = json.loads((tmp_path / "run/events/supervisor.jsonl").read_text())
    assert (event["kind"], event["culprit_rank"], event["step"], event["restarting"]) == ("rank_failed", 1, 12, False)


def test_exception_is_told_with_its_traceback_and_peers_are_not_blamed(tmp_path: Path) -> None:
    # Rank 0 fails first in time with a consequence, as when a socket is reset before the report of the culprit is on disk.
    body = """
    rank_status.enter("forward", 3)
    until(lambda: all(state.phase == "forward" for state in board.read()))
    if rank == 0:
        fail(ConnectionError("peer reset"), peer_failure=True)
    def poisonous_layer():
        raise ValueError("bad shape 3 x 4")
    until(lambda: (run_dir / "errors/rank-000.json").exists())
    fail(poisonous_layer)
    """
    outcome = run(tmp_path, body)
    assert outcome.culprit is not None
    text = describe(outcome.culprit)
    assert text.startswith("rank 1 failed at step 3 in phase 'forward': ValueError: bad shape 3 x 4\n")
    assert "poisonous_layer" in text
    assert "Traceback (most recent call last)" in text
    assert "rank 0 was at step 3 in phase 'forward' and failed in consequence: ConnectionError: peer reset" in text


def test_death_without_report_shows_the_end_of_stderr(tmp_path: Path) -> None:
    outcome = run(tmp_path, 'rank_status.enter("x", 1); raise KeyError("unreported") if rank == 1 else for_ever()')
    assert outcome.culprit is not None
    assert outcome.culprit.cause == "exit code 1, without a report"
    assert "KeyError: 'unreported'" in describe(outcome.culprit)


def test_a_rank_that_ends_with_0_before_it_has_begun_is_named_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = run(tmp_path, "sys.exit(0) if rank == 1 else for_ever()")
    assert time.monotonic() - began < 10.0, "nobody waited for it until a deadline"
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.culprit is not None and outcome.culprit.rank == 1
    assert "it left with exit code 0 without having finished" in describe(outcome.culprit)


def test_what_a_fork_says_is_not_the_word_of_its_rank(tmp_path: Path) -> None:
    body = """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    """
    outcome = run(tmp_path, body, num_ranks=1)
    assert outcome.status == "failed"


def test_crash_in_native_code_shows_its_stack(tmp_path: Path) -> None:
    body = """
    def crashing_kernel():
        os.kill(os.getpid(), signal.SIGSEGV)
    crashing_kernel() if rank == 1 else for_ever()
    """
    outcome = run(tmp_path, body)
    assert outcome.culprit is not None
    assert outcome.culprit.signal == signal.SIGSEGV
    assert "crashing_kernel" in describe(outcome.culprit)


def test_wrong_request_found_by_a_rank_is_exit_2_and_never_restarted(tmp_path: Path) -> None:
    body = """
    from shoal.core.errors import RequestError
    fail(RequestError("model.build: no such module"), code=2)
    """
    outcome = run(tmp_path, body, max_restarts=3)
    assert (outcome.status, outcome.exit_code, outcome.restarts) == ("failed", 2, 0)
    assert outcome.culprit is not None
    assert describe(outcome.culprit) == "model.build: no such module"


def test_sigstop_is_named_within_the_deadline(tmp_path: Path) -> None:
    body = """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank_status.enter("forward" if rank == 1 else "wait: gradients", 5)
    for_ever()
    """
    stopped_at: list[float] = []

    def stop(states: Sequence[StatusReading]) -> None:
        stopped_at.append(time.monotonic())
        os.kill(states[1].pid, signal.SIGSTOP)

    display = Recorder(once(lambda states: all(state.step == 5 for state in states), stop))
    outcome = run(tmp_path, body, display, heartbeat_deadline=1.0)
    assert time.monotonic() - stopped_at[0] < 4.0
    assert outcome.culprit is not None
    text = describe(outcome.culprit)
    assert text.startswith("rank 1 failed at step 5 in phase 'forward': no sign of life for 1")
    assert "the process is stopped" in text
    assert "rank 0 was at step 5 in phase 'wait: gradients'" in text


def test_a_rank_that_runs_in_circles_is_named_with_its_stack(tmp_path: Path) -> None:
    body = """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    def circles():
        for_ever()
    rank_status.enter("forward" if rank == 1 else "wait: gradients", 5)
    circles()
    """
    outcome = run(tmp_path, body, collective_deadline=1.0)
    assert outcome.culprit is not None
    assert outcome.culprit.rank == 1
    text = describe(outcome.culprit)
    assert "it runs but has got no further for 1 s" in text
    assert "in circles" in text


def test_a_rank_that_never_attaches_is_named(tmp_path: Path) -> None:
    worker = tmp_path / "mute.py"
    worker.write_text("import time\ntime.sleep(20)\n")
    request = LaunchRequest(
        argv=[sys.executable, str(worker)],
        num_ranks=1,
        run_dir=tmp_path / "run",
        run_id="test",
        display=Recorder(),
        config=ProcessConfig(start_deadline=0.5),
    )
    outcome = supervise(request)
    assert outcome.culprit is not None
    assert "no sign of life within 0.5 s of its start" in describe(outcome.culprit)
