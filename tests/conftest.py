"""What every test gets: a leak check, one compute thread, and the ``shoal`` command as a real process."""

import os
import signal

import psutil
import pytest

from shoal.core.processor import avoid_hidden_tiles
from support.processes.command import TINY, Shoal

avoid_hidden_tiles(os.environ)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell ignores them for what it starts by nohup or in the background; children inherit that, and Shoal leaves it so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Fail a test that leaves a process behind, and end that process."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    left = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    # The resource tracker of multiprocessing and the nursery of ranks live as long as the test session does.
    kept = ("resource_tracker", "shoal.testing.nursery")
    left = [process for process in left if not any(name in " ".join(process.cmdline()) for name in kept)]
    for process in left:
        process.kill()
    assert not left, f"left behind: {[process.cmdline() for process in left]}"


@pytest.fixture
def shoal(tmp_path):
    """The command line, in ``tmp_path``."""
    command = Shoal(tmp_path)
    yield command
    command.end()


@pytest.fixture
def tiny(tmp_path):
    """A recipe that trains in well under a second."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path
