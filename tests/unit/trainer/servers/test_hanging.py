"""When a portion has lasted too long, by what is usual for this worker; and that somebody watches while it computes."""

import queue
import threading

import pytest

from shoal.trainer.servers import hanging
from shoal.trainer.servers.hanging import Usual, WatchedShares


def usual(*seconds):
    found = Usual()
    for one in seconds:
        found = found.and_one(one)
    return found


def test_nothing_is_too_long_while_nothing_is_known():
    assert usual(0.1, 0.1).limit(50.0, 60.0) is None


@pytest.mark.parametrize(("seconds", "limit"), [((0.1,) * 3, 60.0), ((2.0,) * 5, 100.0), ((90.0, 1.0, 2.0), 50 * 31.0)])
def test_the_limit_is_by_the_mean_and_never_under_the_least(seconds, limit):
    assert usual(*seconds).limit(50.0, 60.0) == pytest.approx(limit)


def test_the_mean_follows_the_last_portions():
    assert usual(*[1.0] * 30, *[9.0] * 200).seconds == pytest.approx(9.0, rel=1e-3)


class Held:
    """Computes at once, but for the steps that it is told to hold."""

    num_samples = 4

    def __init__(self):
        self.free = threading.Event()

    def run(self, step, share, *, part=0, num_parts=1):
        return step

    def run_stretch(self, step, start, stop):
        assert self.free.wait(60)
        return 0.5

    def end(self):
        self.free.set()


@pytest.mark.timeout(120)
def test_a_portion_that_does_not_end_is_told_of_once_with_its_step(monkeypatch):
    monkeypatch.setattr(hanging, "_LOOK_SECONDS", 0.01)
    told, held = queue.Queue(), Held()
    shares = WatchedShares(held, multiple=5.0, least_seconds=0.2, on_hang=lambda *hung: told.put(hung))
    try:
        assert [shares.run(step, 0) for step in range(3)] == [0, 1, 2]
        worker = threading.Thread(target=shares.run_stretch, args=(7, 0, 4))
        worker.start()
        step, seconds, known = told.get(timeout=60)
        assert step == 7 and seconds > 0.2 > known
        held.free.set()
        worker.join(60)
        # It has come back after all: others are measured anew, and nothing was told twice.
        shares.run(8, 0)
        assert told.empty()
    finally:
        shares.end()
