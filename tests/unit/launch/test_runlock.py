"""One holder at a time, and a lock on a file that was removed is not taken for one."""

import fcntl
import os

import pytest

from shoal.launch import runlock
from shoal.launch.runlock import read_holder, release_lock, take_lock


def test_a_second_taker_is_refused_until_the_first_lets_go(tmp_path):
    path = tmp_path / "run.lock"
    first = take_lock(path)
    assert first is not None and take_lock(path) is None
    assert read_holder(path) == str(os.getpid())
    release_lock(first, path)
    assert not path.exists()
    second = take_lock(path)
    assert second is not None
    release_lock(second, path)


def test_the_holder_that_leaves_between_opening_and_locking_costs_another_try(tmp_path, monkeypatch):
    path, honest, calls = tmp_path / "run.lock", fcntl.flock, []

    def flock_after_the_holder_left(fd, how):
        if not calls:
            path.unlink()
        calls.append(fd)
        honest(fd, how)

    monkeypatch.setattr(runlock.fcntl, "flock", flock_after_the_holder_left)
    held = take_lock(path)
    assert len(calls) == 2 and path.exists()
    monkeypatch.undo()
    assert take_lock(path) is None, "the lock that was taken is the one at the path"
    release_lock(held, path)


def test_a_link_in_place_of_the_lock_is_refused(tmp_path):
    (tmp_path / "run.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        take_lock(tmp_path / "run.lock")
    assert not (tmp_path / "elsewhere").exists()
