"""Who holds up a job with parameter servers: times and phases in, the process to end out."""

import time

from shoal.launch.config import ProcessConfig
from shoal.launch.hangs import HangWatch, Member
from shoal.telemetry.statusboard import StatusReading

CONFIG = ProcessConfig(heartbeat_deadline=10.0, collective_deadline=20.0, start_deadline=30.0)


def member(
    rank: int, *, beat: float, phases: int = 0, phase: str = "forward", has_phases: bool = True, pid: int = 0
) -> Member:
    own = pid or 100 + rank
    state = StatusReading(rank=rank, pid=100 + rank, heartbeat=beat, phase=phase, phase_count=phases)
    return Member(state=state, pid=own, has_phases=has_phases)


def look(watch: HangWatch, start: float, seconds: float, *members: Member) -> str:
    found = watch.look(members, now=start + seconds)
    return "" if found is None else f"{found.rank}: {found.reason}"


def test_a_silent_server_is_ended_and_one_that_is_only_idle_is_not() -> None:
    start = time.monotonic()
    watch = HangWatch(CONFIG)
    for second in range(12):
        idle = member(0, beat=start + second, phase="", has_phases=False)
        busy = member(1, beat=start + second, phases=second)
        assert look(watch, start, second, idle, busy) == ""
    silent = member(0, beat=start, phase="", has_phases=False)
    assert look(watch, start, 12, silent, member(1, beat=start + 12, phases=12)).startswith("0: no sign of life for 12")


def test_workers_that_all_stand_still_are_held_up_by_the_one_that_is_furthest_behind() -> None:
    start = time.monotonic()
    watch = HangWatch(CONFIG)
    for second in range(22):
        server = member(0, beat=start + second, phase="", has_phases=False)
        workers = [member(1, beat=start + second, phases=4), member(2, beat=start + second, phases=3)]
        found = look(watch, start, second, server, *workers)
        assert found == ("" if second <= 20 else "2: it runs but has got no further for 20 s")


def test_a_server_is_not_held_to_the_time_in_which_there_were_workers() -> None:
    """In a run of more than five minutes whose only worker died, a server was killed if the watch looked before the worker was
    there again."""
    start = time.monotonic()
    watch = HangWatch(CONFIG)
    for second in range(60):
        server = member(0, beat=start + second, phase="", has_phases=False)
        workers = [member(1, beat=start + second, phases=second)] if second < 30 else []
        found = look(watch, start, second, server, *workers)
        assert found == ("" if second < 50 else "0: it runs but has got no further for 20 s"), second


def test_a_new_process_is_not_held_to_the_heart_of_the_one_before() -> None:
    start = time.monotonic()
    watch = HangWatch(CONFIG)
    for second in range(15):
        assert look(watch, start, second, member(1, beat=start - 60, pid=999)) == ""


def test_time_in_which_the_watch_itself_stood_still_counts_for_nobody() -> None:
    start = time.monotonic()
    watch = HangWatch(CONFIG)
    assert look(watch, start, 0, member(1, beat=start)) == ""
    assert look(watch, start, 1000, member(1, beat=start)) == ""
