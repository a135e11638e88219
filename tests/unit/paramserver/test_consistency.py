"""The update rules, tested without a process: what may be taken and read, when an update closes, what each push counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.updaterule import UpdateRule
from shoal.paramserver.consistency import (
    Lateness,
    age,
    factors,
    is_too_old,
    may_take,
    needs,
    next_update,
    update_deadline,
    wait_seconds,
    waits_for_update,
)
from shoal.paramserver.records import PushRecord

ON_TIME = Lateness()


def push(unit: int, *, samples: int = 4, version: int = 0, worker: str = "a") -> PushRecord:
    return PushRecord(
        worker=worker, number=0, units=(unit,), samples=samples, weight=samples, loss=1.0, version=version
    )


@pytest.mark.parametrize(("text", "expected"), [("bsp", 5), ("ssp:0", 5), ("ssp:3", 2), ("ssp:9", 0), ("async", 0)])
def test_a_read_at_a_step_needs_all_updates_up_to_the_bound(text, expected):
    assert needs(UpdateRule.parse(text), 5) == expected


def test_a_unit_may_be_taken_exactly_when_its_updates_are_closed():
    rule = UpdateRule.parse("ssp:2")
    assert [may_take(rule, step, closed=3) for step in range(8)] == [True] * 6 + [False] * 2
    assert may_take(UpdateRule.parse("async"), 1000, closed=0)


def close(text, pending, *, closed=0, members=3, is_due=False):
    found = next_update(UpdateRule.parse(text), pending, workers=3, closed=closed, members=members, is_due=is_due)
    return [one.units[0] for one in found]


def test_a_stepwise_update_is_all_shares_in_share_order_whatever_their_arrival():
    pending = [push(5), push(2), push(0), push(1)]
    assert close("ssp:3", pending) == [0, 1, 2]
    assert close("ssp:3", pending, closed=1) == []
    # Neither deaths nor a deadline make a step smaller: somebody else computes the share.
    assert close("bsp", pending[:3], members=1, is_due=True) == []


def test_a_quorum_closes_an_update_in_the_order_of_arrival():
    pending = [push(7), push(3)]
    assert close("half:3,0.5", pending) == []
    assert close("half:2,0.5", pending) == [7, 3]
    assert close("half:3,0.5", pending, is_due=True) == [7, 3]
    assert close("half:3,0.5", [], is_due=True) == []
    assert close("async", pending[:1]) == [7]


def test_an_update_never_waits_for_workers_that_are_gone():
    pending = [push(7), push(3)]
    assert close("half:3,0.5", pending, members=2) == [7, 3]
    assert close("half:3,0.5", pending[:1], members=0) == [7]


def test_shares_of_a_step_are_added_as_they_are():
    pending = [push(0, samples=1), push(1, samples=9)]
    assert factors(UpdateRule.parse("ssp:3"), Lateness(staleness_aware=True), 0, pending) == (1.0, 1.0)


@pytest.mark.parametrize(("version", "expected"), [(9, 1.0), (8, 1.0), (7, 0.5), (5, 0.25)])
def test_staleness_aware_async_divides_by_the_age(version, expected):
    late = [push(0, version=version)]
    assert factors(UpdateRule.parse("async"), Lateness(staleness_aware=True), 9, late) == (expected,)
    assert factors(UpdateRule.parse("async"), ON_TIME, 9, late) == (1.0,)


def test_half_on_time_is_the_mean_by_samples():
    entries = [push(0, samples=3, version=4), push(1, samples=1, version=4)]
    assert factors(UpdateRule.parse("half:2,0"), ON_TIME, 4, entries) == (0.75, 0.25)


def test_half_counts_a_late_sample_less_and_keeps_the_length_of_the_update():
    entries = [
        push(0, samples=4, version=4),
        push(1, samples=2, version=4),
        push(2, samples=4, version=1),
    ]
    first, second, late = factors(UpdateRule.parse("half:3,0"), ON_TIME, 4, entries)
    assert first + second + late == pytest.approx(1.0, abs=1e-15)
    assert first / second == pytest.approx(2.0), "those on time are the true mean among themselves"
    assert late / first == pytest.approx(1 / 4), "tau 3 counts 1 / (1 + 3)"


def test_half_keeps_the_discount_when_all_are_late():
    entries = [push(0, samples=1, version=3), push(1, samples=1, version=3)]
    assert factors(UpdateRule.parse("half:2,0"), ON_TIME, 4, entries) == (0.25, 0.25)


def test_the_age_is_counted_to_the_update_that_holds_it():
    late = push(7, version=1)
    assert age(UpdateRule.parse("ssp:3"), late, workers=3, closed=1) == 1
    assert age(UpdateRule.parse("async"), late, workers=3, closed=6) == 5


def test_what_is_past_the_bound_is_too_old():
    assert [is_too_old(Lateness(drop_beyond=2), tau) for tau in (0, 2, 3)] == [False, False, True]
    assert not is_too_old(ON_TIME, 10**6)


@given(seed=st.integers(0, 9), worker=st.integers(0, 9), number=st.integers(0, 99), mean=st.floats(0, 100))
def test_the_wait_is_within_its_bound_and_repeats(seed, worker, number, mean):
    rule = UpdateRule.parse("half:2,0.5")
    drawn = wait_seconds(rule, seed, worker, number, mean)
    assert 0 <= drawn <= 0.5 * mean
    assert drawn == wait_seconds(rule, seed, worker, number, mean)


def test_waits_are_even_and_workers_have_their_own():
    rule = UpdateRule.parse("half:2,0.5")
    waits = [[wait_seconds(rule, 1, worker, number, 2.0) for number in range(500)] for worker in range(2)]
    assert all(0.45 < sum(drawn) / 500 < 0.55 for drawn in waits)
    assert waits[0] != waits[1]
    assert wait_seconds(UpdateRule.parse("bsp"), 1, 0, 0, 2.0) == 0.0


def test_the_deadline_is_the_longest_wait_of_the_slowest_after_the_first_arrival():
    assert update_deadline(UpdateRule.parse("half:3,0.5"), 10.0, [1.0, 4.0, 2.0]) == 12.0
    assert update_deadline(UpdateRule.parse("half:3,0.5"), 10.0, []) is None
    assert update_deadline(UpdateRule.parse("half:3,0"), 10.0, [1.0]) is None, "half without a wait is not async"
    assert update_deadline(UpdateRule.parse("bsp"), 10.0, [1.0]) is None


def test_only_rules_whose_updates_have_several_arrivals_make_a_worker_wait_for_its_update():
    waiting = [
        text
        for text in ("bsp", "ssp:2", "async", "half:2,1", "half:1,1", "downpour")
        if waits_for_update(UpdateRule.parse(text))
    ]
    assert waiting == ["half:2,1"]
