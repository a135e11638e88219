"""Measurements to a machine, and past runs to constants, on numbers that are known."""

import pytest

from shoal.core.errors import RequestError
from shoal.planner.hardware.calibrate import SHAPES, Measured, PastRun, build_machine, build_meeting, fit_runs
from shoal.planner.hardware.machine import Provenance

PROVENANCE = Provenance(date="2026-01-01", cpu="a", cores=2, torch="2", seconds=1.0, what="a test")


def windows(best, *means):
    return [{"mean": mean, "best": best} for mean in means or (best, 2 * best, 3 * best)]


def answer(*, alone=1.0, together=1.0, seconds=1.0, rank_bytes=10):
    timed = {"operation": "all_reduce", "ranks": 2, "num_bytes": 4096, "seconds": seconds}
    return {
        "rank_bytes": rank_bytes,
        "alone": [alone, 2 * alone, alone],
        "together": [together, together, 100 * together],
        "matmuls": [windows(0.1 * (number + 1)) for number in range(len(SHAPES))],
        "copy": {"num_bytes": 100, "windows": windows(0.5)},
        "collectives": [timed],
        "meetings": [],
    }


def test_the_slowest_rank_counts_and_the_first_was_alone():
    answers = [
        answer(alone=2.0, together=3.0, seconds=0.1),
        answer(alone=0.0, together=5.0, seconds=0.4, rank_bytes=30),
    ]
    machine = build_machine([Measured(processes=2, threads=1, answers=answers)], PROVENANCE)
    # Of three turns, 2.5, 1.25 and one in which something else ran, the median.
    assert machine.sharing[0].slow_down == pytest.approx(2.5)
    assert [time.seconds for time in machine.collectives] == [0.4]
    assert machine.rank_bytes == 30
    assert [(time.rows, time.inner, time.outer) for time in machine.matmuls] == list(SHAPES)


def test_processes_that_share_cores_are_timed_by_what_they_get_done_together():
    """Four processes on two cores showed full speed each: every short call fits into a slice of the scheduler's."""
    answers = [{**answer(), "copy": {"num_bytes": 100, "windows": windows(0.1, 0.9, mean)}} for mean in (0.1, 0.3)]
    shared, apart = (
        build_machine([Measured(processes=2, threads=threads, answers=answers)], PROVENANCE).copies[0].seconds
        for threads in (2, 1)
    )
    # In a second window they do 10 and 10 / 3 calls a second: of 2 processes, each one call in 0.15 s.
    assert shared == pytest.approx(0.15)
    assert apart == pytest.approx(0.1), "with a core for each the best call counts: others only make it worse"


def run(compute, communication, measured):
    return PastRun(name="run", compute=compute, communication=communication, measured=measured)


@pytest.mark.parametrize(
    ("alone", "between", "seconds", "factor"),
    [
        pytest.param([1e-4, 1e-3], [3e-4, 3e-3], 0.0, 3.0, id="bytes-are-cold"),
        pytest.param([1e-4, 1e-3], [2e-3, 2.9e-3], 1.9e-3, 1.0, id="the-other-is-late"),
        pytest.param([1e-4, 1e-3], [2.1e-3, 3.9e-3], 1.9e-3, 2.0, id="both"),
        pytest.param([1e-4, 1e-3], [0.0, 0.0], 0.0, 1.0, id="never-less-than-in-a-row"),
        pytest.param([1e-4, 1e-3], [0.0, 1.0], 0.0, 5.0, id="not-without-bounds"),
        pytest.param([1e-3, 1e-3], [2e-3, 9e-3], 1e-3, 1.0, id="sizes-that-are-not-told-apart"),
    ],
)
def test_what_ranks_that_compute_add_is_a_delay_and_a_factor(alone, between, seconds, factor):
    timed = {"operation": "all_reduce", "ranks": 2, "alone": alone, "between": between}
    meeting = build_meeting(4, timed)
    assert (meeting.seconds, meeting.factor) == (pytest.approx(seconds), pytest.approx(factor))
    assert (meeting.operation, meeting.ranks, meeting.processes) == ("all_reduce", 2, 4)


def test_runs_give_the_constants_back_that_made_them():
    parts = [(0.1, 0.01), (0.2, 0.1), (0.05, 0.2), (0.4, 0.02), (0.3, 0.3), (0.02, 0.01)]
    runs = [run(compute, moved, 1.3 * compute + 0.8 * moved + 0.004) for compute, moved in parts]
    fit = fit_runs(runs)
    for one in runs:
        predicted = fit.compute * one.compute + fit.communication * one.communication + fit.fixed_seconds
        assert predicted == pytest.approx(one.measured, rel=0.03)
    assert fit.compute == pytest.approx(1.3, rel=0.05)
    assert fit.communication == pytest.approx(0.8, rel=0.15)


def test_one_run_moves_mostly_what_it_is_made_of():
    fit = fit_runs([run(0.1, 0.001, 0.15)])
    assert fit.compute == pytest.approx(1.5, rel=0.02)
    assert fit.communication == pytest.approx(1.0, abs=0.05)


def test_no_constant_becomes_negative():
    fit = fit_runs([run(0.1, 0.05, 0.1), run(0.2, 0.01, 0.2), run(0.1, 0.1, 0.08)])
    assert fit.compute > 0 and fit.communication > 0 and fit.fixed_seconds >= 0


def test_nothing_cannot_be_fitted():
    with pytest.raises(RequestError, match="nothing to fit"):
        fit_runs([])
