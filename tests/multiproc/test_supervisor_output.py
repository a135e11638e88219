"""The supervisor takes whatever its ranks print, and nothing they leave behind holds it up."""

import os
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.group.request import LaunchRequest
from shoal.launch.ranks import supervise
from shoal.telemetry.statusboard import StatusReading
from support.processes.supervised_ranks import Recorder, all_in, assert_gone, make_request, once, run
from support.processes.supervised_ranks import nothing_left as nothing_left


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


def test_ranks_share_a_store_and_nothing_listens(tmp_path: Path) -> None:
    body = """
    store = os.stat(os.environ["SHOAL_STORE"])
    rank_status.enter("train", store.st_ino)
    until(lambda: (run_dir / "looked").exists())
    """
    listening: list[object] = []
    stores: set[int] = set()

    def look(states: Sequence[StatusReading]) -> None:
        stores.update(state.step for state in states)
        for pid in (os.getpid(), *(state.pid for state in states)):
            found = psutil.Process(pid).net_connections("inet")
            listening.extend(one for one in found if one.status == psutil.CONN_LISTEN)
        (tmp_path / "run/looked").write_text("")

    run(tmp_path, body, Recorder(once(all_in("train"), look)))
    assert len(stores) == 1
    assert not listening


def test_rank_that_cannot_be_started(tmp_path: Path) -> None:
    request = LaunchRequest(
        argv=["/no/such/program"], num_ranks=2, run_dir=tmp_path / "run", run_id="test", display=Recorder()
    )
    with pytest.raises(RunError, match="cannot start rank 0 of 2"):
        supervise(request)


def test_broken_display_leaves_nothing_running(tmp_path: Path) -> None:
    def broken(states: Sequence[StatusReading]) -> None:
        raise RuntimeError("display")

    with pytest.raises(RuntimeError, match="display"):
        supervise(make_request(tmp_path, "for_ever()", Recorder(broken)))


def test_log_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").write_text("a file where a folder should be")
    display = Recorder()
    assert run(tmp_path, 'print("still shown")', display).status == "completed"
    assert "[rank 1] still shown" in display.text
