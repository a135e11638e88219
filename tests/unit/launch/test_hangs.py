"""The watch, on made-up clocks: who is silent, who stands still, and who is only waiting."""

from shoal.launch.config import ProcessConfig
from shoal.launch.hangs import Hang, Watched, find_hang, is_waiting
from shoal.telemetry.statusboard import StatusReading

CONFIG = ProcessConfig(heartbeat_deadline=30, collective_deadline=300, start_deadline=120)


def rank(
    number: int,
    *,
    heartbeat: float | None = 1000.0,
    phase: str = "forward",
    count: int = 10,
    progress: float = 1000.0,
    running: bool = True,
) -> Watched:
    state = StatusReading(rank=number, heartbeat=heartbeat, phase=phase, phase_count=count)
    return Watched(state=state, started_at=0.0, progress_at=progress, is_running=running)


def find(*ranks: Watched, now: float, awake_since: float = 0.0) -> Hang | None:
    return find_hang(ranks, now=now, awake_since=awake_since, config=CONFIG)


def named(*ranks: Watched, now: float) -> int:
    hang = find(*ranks, now=now)
    assert hang is not None
    return hang.rank


def test_all_is_well() -> None:
    assert find(rank(0), rank(1), now=1029.0) is None
    assert find(now=1e9) is None


def test_silent_rank() -> None:
    hang = find(rank(0, heartbeat=1031.0), rank(1), now=1031.0)
    assert hang == Hang(rank=1, reason="no sign of life for 31.0 s (deadline 30 s)")


def test_longest_silent_is_named() -> None:
    assert named(rank(0, heartbeat=990.0), rank(1, heartbeat=980.0), rank(2, heartbeat=985.0), now=1031.0) == 1


def test_dead_ranks_are_not_silent() -> None:
    assert find(rank(0, heartbeat=1031.0), rank(1, running=False), now=1031.0) is None


def test_start_deadline() -> None:
    assert find(rank(0, heartbeat=None, progress=119.0), now=119.0) is None
    assert named(rank(0, heartbeat=121.0), rank(1, heartbeat=None), now=121.0) == 1


def test_pause_of_the_watch_is_nobodys_fault() -> None:
    ranks = (rank(0), rank(1, heartbeat=None))
    assert find(*ranks, now=5000.0, awake_since=4999.0) is None
    assert find(*ranks, now=5031.0, awake_since=4999.0) is not None


def still(number: int, phase: str, count: int = 10, running: bool = True) -> Watched:
    return rank(number, heartbeat=1301.0, phase=phase, count=count, progress=1000.0, running=running)


def test_busy_rank_is_named_and_waiting_ones_are_not() -> None:
    assert named(still(0, "wait: gradients"), still(1, "forward"), now=1301.0) == 1


def test_one_that_still_moves_acquits_all() -> None:
    moving = rank(2, heartbeat=1301.0, progress=1290.0)
    assert find(still(0, "wait: gradients"), still(1, "forward"), moving, now=1301.0) is None


def test_furthest_behind_of_several() -> None:
    assert named(still(0, "forward", 12), still(1, "forward", 11), now=1301.0) == 1
    assert named(still(0, "wait: a", 12), still(1, "wait: b", 11), now=1301.0) == 1


def test_rank_that_left_early_is_named_when_the_rest_waits() -> None:
    assert named(still(0, "wait: gradients"), still(1, "done", running=False), now=1301.0) == 1


def test_waiting_is_a_prefix() -> None:
    assert is_waiting("wait: all-reduce")
    assert not is_waiting("waiting")
