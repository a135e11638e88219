"""The supervisor with real ranks: tiny workers without torch that keep the contract of the environment, so tests are quick."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.elastic.config import ElasticConfig
from shoal.elastic.launch import LaunchRequest
from shoal.elastic.outcome import Outcome
from shoal.elastic.story import describe
from shoal.elastic.supervisor import supervise
from shoal.telemetry.board import SlotState

PRELUDE = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from shoal.comm.lifeline import die_with_parent
from shoal.elastic.reports import ErrorReport, write_report
from shoal.telemetry.board import Board, Heartbeat

die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
run_dir = Path(os.environ["SHOAL_RUN_DIR"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ["SHOAL_GENERATION"])
board = Board.attach(int(os.environ["SHOAL_BOARD_FD"]), size)
slot = board.slot(rank)
heart = Heartbeat(slot, every=0.05)

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
        where = slot.read()
        report = ErrorReport.of(raised, rank=rank, step=where.step, phase=where.phase, peer_failure=peer_failure)
        write_report(run_dir, report)
    os._exit(code)

def for_ever():
    until(lambda: False, seconds=30.0)

"""


class Recorder:
    """A display that keeps what it is shown, and can act on what it sees: that is how tests strike at an exact moment."""

    def __init__(self, on_update: Callable[[Sequence[SlotState]], None] | None = None) -> None:
        self.messages: list[str] = []
        self.is_closed = False
        self._on_update = on_update

    @property
    def text(self) -> str:
        return "\n".join(self.messages)

    def update(self, states: Sequence[SlotState]) -> None:
        if self._on_update is not None:
            self._on_update(states)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        self.is_closed = True


def once(
    ready: Callable[[Sequence[SlotState]], bool], act: Callable[[Sequence[SlotState]], None]
) -> Callable[[Sequence[SlotState]], None]:
    done: list[bool] = []

    def look(states: Sequence[SlotState]) -> None:
        if not done and ready(states):
            done.append(True)
            act(states)

    return look


def all_in(phase: str) -> Callable[[Sequence[SlotState]], bool]:
    return lambda states: all(state.phase == phase for state in states)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
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
    worker.write_text(PRELUDE + textwrap.dedent(body))
    return LaunchRequest(
        argv=[sys.executable, str(worker)],
        num_ranks=num_ranks,
        run_dir=folder / "run",
        run_id="test",
        display=display,
        config=ElasticConfig.model_validate({"heartbeat_deadline": 10.0, "stop_grace": 10.0, **deadlines}),
        env=env or {},
    )


def run(folder: Path, body: str, display: Recorder | None = None, **options: object) -> Outcome:
    recorder = display or Recorder()
    outcome = supervise(make_request(folder, body, recorder, **options))  # type: ignore[arg-type]
    assert recorder.is_closed
    return outcome


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
    assert (second["GROUP_RANK"], second["MASTER_ADDR"], second["TORCHELASTIC_RESTART_COUNT"]) == (
        "0",
        "127.0.0.1",
        "0",
    )
    assert (second["TORCHELASTIC_RUN_ID"], second["OMP_NUM_THREADS"], second["EXTRA"]) == ("test", "1", "1")
    assert second["GLOO_SOCKET_IFNAME"] == "lo"
    assert first["SHOAL_SUPERVISOR_PID"] == str(os.getpid())
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert "SHOAL_STORE_FD" in first
    assert "SHOAL_STORE_FD" not in second


def test_kill_9_of_a_rank_is_named(tmp_path: Path) -> None:
    body = """
    slot.enter("backward" if rank == 1 else "wait: gradients", 12)
    for_ever()
    """
    killed_at: list[float] = []

    def kill(states: Sequence[SlotState]) -> None:
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
    slot.enter("forward", 3)
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
    outcome = run(tmp_path, 'slot.enter("x", 1); raise KeyError("unreported") if rank == 1 else for_ever()')
    assert outcome.culprit is not None
    assert outcome.culprit.cause == "exit code 1, without a report"
    assert "KeyError: 'unreported'" in describe(outcome.culprit)


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
    slot.enter("forward" if rank == 1 else "wait: gradients", 5)
    for_ever()
    """
    stopped_at: list[float] = []

    def stop(states: Sequence[SlotState]) -> None:
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
    slot.enter("forward" if rank == 1 else "wait: gradients", 5)
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
        config=ElasticConfig(start_deadline=0.5),
    )
    outcome = supervise(request)
    assert outcome.culprit is not None
    assert "no sign of life within 0.5 s of its start" in describe(outcome.culprit)


ORDERLY = """
stopping = []
signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
slot.enter("train", 7)
until(lambda: stopping)
(run_dir / f"saved-{rank}").write_text("x")
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
    outcome = run(tmp_path, "sys.exit(3)")
    assert (outcome.status, outcome.signal, outcome.exit_code) == ("interrupted", None, 0)


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
slot.enter("train", 7)
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

    def strike(states: Sequence[SlotState]) -> None:
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
    slot.enter("train", 7)
    until(lambda: stopping)
    fail(OSError("disk full")) if rank == 1 else for_ever()
    """
    display = Recorder(once(all_in("train"), lambda states: os.kill(os.getpid(), signal.SIGTERM)))
    outcome = run(tmp_path, body, display)
    assert outcome.status == "interrupted"
    assert outcome.culprit is not None
    assert "disk full" in describe(outcome.culprit)


def test_restart_has_a_new_generation_and_a_new_port(tmp_path: Path) -> None:
    body = """
    with (run_dir / f"starts-{rank}").open("a") as file:
        print(generation, os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
    slot.enter("train", 4)
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
    slot.enter("train", generation)
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


def test_any_output_is_taken(tmp_path: Path) -> None:
    body = r"""
    out = sys.stdout.buffer
    out.write(bytes(range(256)) * 50)
    out.write(b"\n" + b"y" * 300_000 + b"\n")
    out.write(b"50%\r100%\n\x1b[2J\x1b[31mred\x1b[0m\n")
    out.write(b"no newline at the end")
    out.flush()
    """
    display = Recorder()
    outcome = run(tmp_path, body, display)
    assert outcome.status == "completed"
    lines = display.text.splitlines()
    assert "[rank 1] no newline at the end" in lines
    assert "[rank 1] 100%" in lines
    assert "[rank 1] red" in lines
    assert "\x1b" not in display.text
    assert "\x00" not in display.text
    assert max(map(len, lines)) < 5000
    assert (tmp_path / "run/logs/rank-001.log").read_bytes().count(b"y") >= 300_000


def test_ten_megabytes_are_drained(tmp_path: Path) -> None:
    body = """
    line = "z" * 99 + "\\n"
    for _ in range(50_000):
        sys.stdout.write(line)
        sys.stderr.write(line)
    """
    began = time.monotonic()
    outcome = run(tmp_path, body, num_ranks=1)
    assert outcome.status == "completed"
    assert time.monotonic() - began < 20.0
    assert (tmp_path / "run/logs/rank-000.log").read_bytes().count(b"z" * 99 + b"\n") == 100_000


def test_rank_that_closes_its_output_costs_no_time(tmp_path: Path) -> None:
    body = """
    os.close(1)
    os.close(2)
    until(lambda: time.monotonic() > began + 1.0)
    """
    before = time.process_time()
    assert run(tmp_path, "began = time.monotonic()\n" + textwrap.dedent(body)).status == "completed"
    assert time.process_time() - before < 0.4


def test_what_a_rank_left_running_is_ended_and_does_not_hold_us_up(tmp_path: Path) -> None:
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (run_dir / f"child-{rank}").write_text(str(child.pid))
    """
    began = time.monotonic()
    outcome = run(tmp_path, body)
    assert outcome.status == "completed"
    assert time.monotonic() - began < 10.0
    for rank in (0, 1):
        assert_gone([int((tmp_path / f"run/child-{rank}").read_text())], Deadline(seconds=5))


def test_store_socket_is_on_loopback_and_only_rank_0_keeps_it(tmp_path: Path) -> None:
    body = """
    slot.enter("train", int(os.environ["MASTER_PORT"]))
    until(lambda: (run_dir / "looked").exists())
    """
    found: list[tuple[str, list[int | None], bool]] = []

    def look(states: Sequence[SlotState]) -> None:
        port = states[0].step
        listening = [entry for entry in psutil.net_connections("inet") if entry.laddr and entry.laddr.port == port]
        ours = any(entry.pid == os.getpid() for entry in psutil.Process().net_connections("inet"))
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            pass
        holders = [entry.pid for entry in listening if entry.status == psutil.CONN_LISTEN]
        found.append((listening[0].laddr.ip, holders, ours))
        assert holders == [states[0].pid]
        (tmp_path / "run/looked").write_text("")

    run(tmp_path, body, Recorder(once(all_in("train"), look)))
    assert found[0][0] == "127.0.0.1"
    assert not found[0][2]


def test_rank_that_cannot_be_started(tmp_path: Path) -> None:
    request = LaunchRequest(
        argv=["/no/such/program"], num_ranks=2, run_dir=tmp_path / "run", run_id="test", display=Recorder()
    )
    with pytest.raises(RunError, match="cannot start rank 0 of 2"):
        supervise(request)


def test_broken_display_leaves_nothing_running(tmp_path: Path) -> None:
    def broken(states: Sequence[SlotState]) -> None:
        raise RuntimeError("display")

    with pytest.raises(RuntimeError, match="display"):
        supervise(make_request(tmp_path, "for_ever()", Recorder(broken)))


def test_log_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").write_text("a file where a folder should be")
    display = Recorder()
    assert run(tmp_path, 'print("still shown")', display).status == "completed"
    assert "[rank 1] still shown" in display.text


DRIVER = """
import sys
from pathlib import Path
from shoal.elastic.config import ElasticConfig
from shoal.elastic.launch import LaunchRequest
from shoal.elastic.supervisor import supervise
from shoal.telemetry.progress import PlainDisplay
import threading
folder = Path(sys.argv[1])
request = LaunchRequest(argv=[sys.executable, str(folder / "worker.py")], num_ranks=2, run_dir=folder / "run", run_id="t",
                        display=PlainDisplay(sys.stderr, every=1.0))
outcome = supervise(request)
assert threading.active_count() == 1
assert "torch" not in sys.modules, "the supervisor imported torch"
assert "numpy" not in sys.modules, "the supervisor imported numpy"
print(outcome.status)
"""


def start_driver(folder: Path, body: str) -> "subprocess.Popen[str]":
    make_request(folder, body, Recorder())
    (folder / "driver.py").write_text(DRIVER)
    return subprocess.Popen(
        [sys.executable, str(folder / "driver.py"), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_gone(pids: Sequence[int], deadline: Deadline) -> None:
    while any(is_alive(pid) for pid in pids):
        deadline.check(f"the end of processes {[pid for pid in pids if is_alive(pid)]}")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_supervisor_imports_no_torch_and_has_no_thread(tmp_path: Path) -> None:
    driver = start_driver(tmp_path, "pass")
    out, err = driver.communicate(timeout=30)
    assert (driver.returncode, out.strip()) == (0, "completed"), err


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    # One rank trains; the other blocks every signal that can be blocked, which must not save it.
    body = """
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals)) if rank == 1 else None
    (run_dir / f"pid-{rank}.tmp").write_text(f"{os.getpid()} {os.environ['MASTER_PORT']}")
    (run_dir / f"pid-{rank}.tmp").rename(run_dir / f"pid-{rank}")
    for_ever()
    """
    driver = start_driver(tmp_path, body)
    files = [tmp_path / f"run/pid-{rank}" for rank in (0, 1)]
    deadline = Deadline(seconds=20)
    while not all(file.exists() for file in files):
        deadline.check("both ranks to start")
        time.sleep(0.01)
    pids = [int(file.read_text().split()[0]) for file in files]
    port = int(files[0].read_text().split()[1])
    assert all(is_alive(pid) for pid in pids)
    driver.kill()
    driver.communicate(timeout=10)
    assert_gone(pids, Deadline(seconds=2))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
