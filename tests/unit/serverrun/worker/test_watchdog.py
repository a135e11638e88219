"""When a work unit has lasted too long, by what is usual for this worker; and that somebody watches while it computes."""

import queue
import threading

import pytest

from shoal.serverrun.worker import watchdog as hanging
from shoal.serverrun.worker.watchdog import Awake, Usual, WatchedShares


def usual(*seconds):
    found = Usual()
    for one in seconds:
        found = found.and_one(one)
    return found


def test_nothing_is_too_long_while_nothing_is_known():
    assert usual(0.1, 0.1).limit(50.0, 60.0) is None


@pytest.mark.parametrize(("seconds", "limit"), [((0.1,) * 3, 60.0), ((2.0,) * 5, 100.0), ((90.0, 1.0, 2.0), 180.0)])
def test_the_limit_is_by_the_median_and_the_longest_and_never_under_the_least(seconds, limit):
    assert usual(*seconds).limit(50.0, 60.0) == pytest.approx(limit)


def test_one_long_unit_makes_nobody_patient_for_many_times_its_length():
    """A rank of the group was paused for ten minutes: not 50 times a mean with that in it."""
    assert usual(*[2.0] * 10, 600.0).limit(50.0, 60.0) == pytest.approx(1200.0)
    assert usual(*[2.0] * 10, 600.0, *[2.0] * 20).limit(50.0, 60.0) == pytest.approx(100.0), "and soon it is forgotten"


def test_what_is_usual_follows_the_last_units():
    assert usual(*[1.0] * 30, *[9.0] * 20).seconds == pytest.approx(9.0)


def test_a_process_that_stood_still_did_not_run():
    awake = Awake(looked=100.0).and_look(100.25, 1.0)
    assert awake.ran_until(100.5, 1.0) == pytest.approx(100.5)
    # Stopped at 100.5 and continued at 700: a work unit that ends then is timed before anybody has looked again.
    assert awake.ran_until(700.0, 1.0) == pytest.approx(101.25)
    looked = awake.and_look(700.0, 1.0)
    assert looked.ran_until(700.0, 1.0) == pytest.approx(101.25)
    assert looked.ran_until(700.5, 1.0) == pytest.approx(101.75)


class HistoryState:
    """Computes at once, but for the steps that it is told to hold."""

    num_samples = 4

    def __init__(self):
        self.free = threading.Event()

    def run(self, step, share, *, part=0, num_parts=1, data=None):
        return step

    def run_span(self, step, start, stop):
        assert self.free.wait(60)
        return 0.5

    def end(self):
        self.free.set()


@pytest.mark.timeout(120)
def test_a_unit_that_does_not_end_is_told_of_once_with_its_step(monkeypatch):
    monkeypatch.setattr(hanging, "_LOOK_SECONDS", 0.01)
    told, held = queue.Queue(), HistoryState()
    shares = WatchedShares(held, multiple=5.0, least_seconds=0.2, on_hang=lambda *hung: told.put(hung))
    try:
        assert [shares.run(step, 0) for step in range(3)] == [0, 1, 2]
        worker = threading.Thread(target=shares.run_span, args=(7, 0, 4))
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


class Paused(HistoryState):
    """Its work unit lasts a minute, in all of which the process stands still."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def run(self, step, share, *, part=0, num_parts=1, data=None):
        self.clock.now += 60.0 if step == 1 else 0.1
        if step == 2:
            raise RuntimeError("refused")
        return step


class Clock:
    """Stands where it is put."""

    now = 1000.0

    def monotonic(self):
        return self.now


def test_a_pause_and_a_unit_that_failed_do_not_count_as_usual(monkeypatch):
    """No watch looks here, as none does while the process stands still."""
    clock = Clock()
    monkeypatch.setattr(hanging, "time", clock)
    monkeypatch.setattr(WatchedShares, "_watch", lambda self: None)
    shares = WatchedShares(Paused(clock), multiple=5.0, least_seconds=0.2, on_hang=pytest.fail)
    try:
        shares.run(0, 0)
        shares.run(1, 0)
        with pytest.raises(RuntimeError, match="refused"):
            shares.run(2, 0)
        assert shares._usual.last == pytest.approx((0.1, 0.9)), "a look is missed, and no more"
    finally:
        shares.end()
