"""Goodput: published optima, the closed form against failures played one by one, and time that is all accounted for."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.planner.simulation.goodput import (
    Failures,
    best_interval,
    daly_interval,
    expected_goodput,
    expected_loss,
    simulate_goodput,
    young_interval,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def failures(
    mtbf: float, *, checkpoint: float = 5 * MINUTE, restart: float = 10 * MINUTE, num_devices: int = 1
) -> Failures:
    return Failures(device_mtbf=mtbf * num_devices, num_devices=num_devices, restart=restart, checkpoint=checkpoint)


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_optima_that_daly_printed(mtbf, minutes):
    """Captions of figures 3 to 5: M as here, a restart of 10 minutes, a dump of 5."""
    found = failures(mtbf)
    assert float(f"{daly_interval(found) / MINUTE:.3g}") == pytest.approx(minutes, rel=0.006)
    assert best_interval(1.0, found) / MINUTE == pytest.approx(minutes, rel=0.01)


def test_young_is_the_first_order_of_the_optimum():
    """The relative distance to the true optimum goes down with sqrt(C / M), and is under 1% where C is under M / 5,000."""
    distances = []
    for checkpoint in (60.0, 6.0, 0.6):
        found = failures(DAY, checkpoint=checkpoint)
        best = best_interval(0.01, found) * 0.01
        distances.append(abs(young_interval(found) - best) / best)
    assert distances[0] > distances[1] > distances[2] and distances[1] < 0.01
    assert young_interval(failures(DAY, checkpoint=60.0)) == math.sqrt(2 * 60.0 * DAY)


@settings(max_examples=60, deadline=None)
@given(st.floats(100.0, 1e6), st.floats(0.01, 100.0), st.floats(0.0, 1000.0), st.floats(0.1, 50.0))
def test_no_other_number_of_steps_does_better_than_the_best(mtbf, checkpoint, restart, step_seconds):
    found = failures(mtbf, checkpoint=checkpoint, restart=restart)
    best = best_interval(step_seconds, found)
    highest = expected_goodput(best * step_seconds, found)
    tried = {1, 2, max(1, best - 1), best + 1, max(1, best // 2), best * 2, best * 10}
    assert all(expected_goodput(steps * step_seconds, found) <= highest for steps in tried)


@pytest.mark.parametrize(("num_devices", "interval"), [(1, 60), (1024, 60), (16384, 20), (16384, 111)])
def test_failures_played_one_by_one_give_the_closed_form(num_devices, interval):
    """Ten independent runs; their mean lies within four standard errors of it. 50,000 hours a device."""
    found = Failures(device_mtbf=50_000 * HOUR, num_devices=num_devices, restart=600.0, checkpoint=60.0)
    days = 100 if num_devices > 1 else 200_000
    runs = [
        simulate_goodput(found, step_seconds=10.0, interval_steps=interval, num_steps=int(days * DAY / 10), seed=seed)
        for seed in range(10)
    ]
    shares = np.array([run.goodput for run in runs])
    expected = expected_goodput(interval * 10.0, found)
    assert abs(shares.mean() - expected) < 4 * shares.std(ddof=1) / math.sqrt(10)
    lost = np.array([run.loss_per_failure for run in runs])
    assert abs(lost.mean() - expected_loss(interval * 10.0, found)) < 4 * lost.std(ddof=1) / math.sqrt(10)
    assert min(run.num_failures for run in runs) > 10


@settings(max_examples=60, deadline=None)
@given(
    st.floats(500.0, 1e5),
    st.floats(0.0, 60.0),
    st.floats(0.0, 200.0),
    st.integers(1, 20),
    st.integers(1, 3000),
    st.integers(0, 10),
)
def test_the_parts_of_a_run_are_all_of_it(mtbf, checkpoint, restart, interval, num_steps, seed):
    found = failures(mtbf, checkpoint=checkpoint, restart=restart, num_devices=8)
    run = simulate_goodput(found, step_seconds=2.0, interval_steps=interval, num_steps=num_steps, seed=seed)
    parts = run.useful_seconds + run.lost_seconds + run.restart_seconds + run.checkpoint_seconds
    assert run.wall_seconds == pytest.approx(parts, rel=1e-9)
    assert run.useful_seconds == 2.0 * num_steps == 2.0 * sum(attempt.num_steps for attempt in run.attempts)
    assert run.num_checkpoints == math.ceil(num_steps / run.interval_steps)
    for before, after in zip(run.attempts, run.attempts[1:], strict=False):
        assert before.failed_rank is not None and 0 <= before.failed_rank < 8
        assert after.first_step == before.first_step + before.num_steps
        assert after.start >= before.end + restart
        # Nothing that was lost is longer than what lies between two checkpoints.
        assert 0 <= before.lost <= run.interval_steps * 2.0 + checkpoint + 1e-6
    assert run.attempts[-1].failed_rank is None and run.attempts[-1].end == run.wall_seconds


def play_segment_by_segment(
    found: Failures, step_seconds: float, interval: int, num_steps: int, seed: int
) -> tuple[float, int]:
    """Wall seconds and checkpoints of the same draws, without the jump over whole segments."""
    random = np.random.default_rng(derive_key("goodput", seed))
    now, done, saved, fails_at = 0.0, 0, 0, random.exponential(found.mtbf)
    while done < num_steps:
        steps = min(interval, num_steps - done)
        until = now + steps * step_seconds + found.checkpoint
        if until <= fails_at:
            now, done, saved = until, done + steps, saved + 1
            continue
        now = fails_at
        random.integers(found.num_devices)
        while (gap := random.exponential(found.mtbf)) < found.restart:
            now += gap
        now, fails_at = now + found.restart, now + gap
    return now, saved


@pytest.mark.parametrize("num_steps", [7, 100, 103, 1001])
@pytest.mark.parametrize("seed", range(12))
def test_jumping_to_the_next_failure_misses_nothing(num_steps, seed):
    """Also where the last segment is shorter than the others, and a failure falls into it."""
    found = failures(200.0, checkpoint=3.0, restart=40.0, num_devices=4)
    run = simulate_goodput(found, step_seconds=2.0, interval_steps=9, num_steps=num_steps, seed=seed)
    wall, saved = play_segment_by_segment(found, 2.0, run.interval_steps, num_steps, seed)
    assert run.wall_seconds == pytest.approx(wall, rel=1e-9) and run.num_checkpoints == saved


def test_a_device_that_never_fails_costs_checkpoints_alone():
    run = simulate_goodput(failures(1e15), step_seconds=1.0, interval_steps=100, num_steps=1000)
    assert run.num_failures == 0 and run.wall_seconds == 1000 + 10 * 300 and run.goodput == 1000 / 4000


def test_the_same_seed_is_the_same_run_and_another_is_not():
    runs = [
        simulate_goodput(failures(HOUR), step_seconds=1.0, interval_steps=60, num_steps=50_000, seed=seed)
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_failure_in_a_short_segment_costs_half_of_it():
    assert expected_loss(100.0, failures(1e9, checkpoint=0.0)) == pytest.approx(50.0, rel=1e-6)
    # Where the series takes over, both forms agree.
    near, far = (expected_loss(work, failures(1.0, checkpoint=0.0)) for work in (0.99e-4, 1.01e-4))
    assert near / 0.99 == pytest.approx(far / 1.01, rel=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(RequestError, match="the restart is -1 s"):
        failures(DAY, restart=-1.0)
    with pytest.raises(RequestError, match="0 devices"):
        Failures(device_mtbf=1.0, num_devices=0, restart=0.0, checkpoint=0.0)
    with pytest.raises(RequestError, match="with a checkpoint every 0"):
        simulate_goodput(failures(DAY), step_seconds=1.0, interval_steps=0, num_steps=5)
    with pytest.raises(RequestError, match=r"of the time would be progress; set the interval to \d+ steps"):
        simulate_goodput(failures(600.0, restart=10.0), step_seconds=1.0, interval_steps=100_000, num_steps=1_000_000)
    assert expected_goodput(1e9, failures(1.0)) == 0.0
