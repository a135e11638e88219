"""A supervisor that dies takes its ranks with it."""

import subprocess
import sys
import time
from pathlib import Path

from shoal.core.clock import Deadline
from support.processes.supervised_ranks import Recorder, assert_gone, is_alive, make_request
from support.processes.supervised_ranks import nothing_left as nothing_left

DRIVER = """
import sys
from pathlib import Path
from shoal.launch.config import ProcessConfig
from shoal.launch.group.request import LaunchRequest
from shoal.launch.ranks import supervise
from shoal.telemetry.display import PlainDisplay
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


def test_supervisor_imports_no_torch_and_has_no_thread(tmp_path: Path) -> None:
    driver = start_driver(tmp_path, "pass")
    out, err = driver.communicate(timeout=30)
    assert (driver.returncode, out.strip()) == (0, "completed"), err


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    # One rank trains; the other blocks every signal that can be blocked, which must not save it.
    body = """
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals)) if rank == 1 else None
    (run_dir / f"pid-{rank}.tmp").write_text(str(os.getpid()))
    (run_dir / f"pid-{rank}.tmp").rename(run_dir / f"pid-{rank}")
    for_ever()
    """
    driver = start_driver(tmp_path, body)
    files = [tmp_path / f"run/pid-{rank}" for rank in (0, 1)]
    deadline = Deadline(seconds=20)
    while not all(file.exists() for file in files):
        deadline.check("both ranks to start")
        time.sleep(0.01)
    pids = [int(file.read_text()) for file in files]
    assert all(is_alive(pid) for pid in pids)
    driver.kill()
    driver.communicate(timeout=10)
    assert_gone(pids, Deadline(seconds=2))
