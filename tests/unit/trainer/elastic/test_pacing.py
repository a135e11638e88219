"""Who is slow is found from what ranks add up about themselves."""

import threading
import time

from shoal.launch.group.control import ControlBoard, Pace
from shoal.trainer.elastic.pacing import PaceMeter, PaceWatch, busy_seconds

MEMBERS = ["rank 0", "rank 1", "rank 2"]


def look(watch, *, compute=(1.0, 1.0, 1.0), data=(0.0, 0.0, 0.0), rounds=8, first=0, members=MEMBERS):
    """So many looks, a second and three steps apart."""
    found = []
    for turn in range(first, first + rounds):
        paces = {
            member: Pace(steps=3 * turn, compute=3 * turn * compute[place], data=3 * turn * data[place])
            for place, member in enumerate(MEMBERS)
        }
        found += watch.look(paces, members, now=100.0 + turn)
    return found


def test_a_rank_that_computes_for_longer_is_named_once_with_the_reason():
    watch = PaceWatch(1.5)
    (found,) = look(watch, compute=(1.0, 1.0, 2.0), rounds=12)
    assert (found.rank, found.reason, round(found.factor, 6)) == ("rank 2", "compute", 2.0)
    assert look(PaceWatch(2.5), compute=(1.0, 1.0, 2.0), rounds=12) == []


def test_one_that_waits_for_its_data_is_named_for_that():
    (found,) = look(PaceWatch(1.5), data=(0.0, 3.0, 0.1))
    assert (found.rank, found.reason) == ("rank 1", "data")


def test_after_another_view_all_begins_anew():
    watch = PaceWatch(1.5)
    assert look(watch, compute=(1.0, 1.0, 2.0), rounds=5) == [], "too few steps"
    watch.forget()
    assert look(watch, compute=(1.0, 1.0, 2.0), rounds=5, first=5) == []
    assert len(look(watch, compute=(1.0, 1.0, 2.0), rounds=2, first=10)) == 1


def test_nobody_is_compared_while_one_says_nothing_or_takes_no_step():
    watch = PaceWatch(1.5)
    assert look(watch, compute=(1.0, 1.0, 5.0), members=[*MEMBERS, "rank 3"]) == []
    still = {member: Pace(steps=5, compute=5.0) for member in MEMBERS}
    assert all(watch.look(still, MEMBERS, now=float(now)) == [] for now in range(200, 230))


def test_time_in_which_a_thread_waits_is_not_counted_and_time_in_which_it_works_is():
    begun = busy_seconds()
    threading.Event().wait(0.05)
    waited = busy_seconds() - begun
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert busy_seconds() - begun - waited >= 0.049 and waited < 0.04


def test_what_a_rank_says_arrives_on_the_board_of_its_supervisor():
    board, clock = ControlBoard.create(2), iter([0.0, 10.0, 10.5, 11.25])
    try:
        meter = PaceMeter(lambda pace: board.say_pace(1, pace), measure=lambda: next(clock))
        meter.begin()
        meter.step(data_seconds=0.25)
        meter.step(data_seconds=0.0)
        assert board.answers(1).pace == Pace(steps=2, compute=1.25, data=0.25) and board.answers(0).pace == Pace()
        board.say_failed(1, 3, suspect=0)
        assert board.answers(1).suspect == 0 and board.answers(0).suspect is None
    finally:
        board.close()
