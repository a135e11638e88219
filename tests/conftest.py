"""What every test gets: a leak check, one compute thread, and the ``shoal`` command as a real process."""

import contextlib
import os
import signal
import threading

import pytest

from shoal.launch import forkclient
from shoal.launch.processor import avoid_hidden_tiles
from support.processes import warm
from support.processes.command import TINY, Shoal
from support.session.leaks import descendants, left_behind, threads_left
from support.session.timing import (  # noqa: F401 (pytest finds hooks here)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
)

avoid_hidden_tiles(os.environ)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell ignores them for what it starts by nohup or in the background; children inherit that, and Shoal leaves it so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
warm.remember_environment()
forkclient.start_interpreter, forkclient.FEWEST_TO_FORK = warm.start_interpreter, 1


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Fail a test that leaves a process or a thread behind, and end that process."""
    before, threads = descendants(os.getpid()), set(threading.enumerate())
    yield
    left = left_behind(before)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"
    assert not (alive := threads_left(threads)), f"threads left behind: {alive}"


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
