"""Copies that two threads make together."""

import os
import signal

import numpy as np
import pytest

from shoal.comm.wire import buffers
from shoal.comm.wire.buffers import copy, see
from support.wire.operations import noise

SIZES = [0, 1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3]


@pytest.mark.parametrize("has_cores", [True, False])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_byte_is_copied_and_none_beside(num_bytes, has_cores, monkeypatch):
    monkeypatch.setattr(buffers, "_HAS_CORES", has_cores)
    source, target = noise(num_bytes), np.full(num_bytes + 2, 7, np.uint8)
    copy(see(source), see(target[1:-1]))
    assert np.array_equal(target[1:-1], source) and target[0] == target[-1] == 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12 and later
def test_a_fork_has_a_thread_of_its_own():
    """Its parent's is not there, and whoever waited for it would wait for ever."""
    source, target = noise(8 << 20), np.zeros(8 << 20, np.uint8)
    copy(see(source), see(target))
    child = os.fork()
    if not child:
        signal.alarm(20)
        target[:] = 0
        for _ in range(20):
            copy(see(source), see(target))
        os._exit(0 if np.array_equal(source, target) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
