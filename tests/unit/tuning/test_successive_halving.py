"""Plans against each other on a machine that drifts: told times, no process."""

import itertools

import pytest

from shoal.core.errors import RunError
from shoal.tuning.successive_halving import Entry, halve_plans, rank

TRUE = {"dp=4": 1.00, "dp=2 tp=2": 1.08, "dp=2 cp=2": 1.30, "dp=1 cp=4": 2.0}


def drifting(true, *, drift, seen=None):
    """Plays plans in their true time, times what the machine does in that round; a round is one turn of each that is left."""
    turns = dict.fromkeys(true, 0)

    def play(plan, steps):
        text = str(plan)
        if seen is not None:
            seen.append(text)
        factor = drift[turns[text] % len(drift)]
        turns[text] += 1
        return [true[text] * factor] * steps

    return play


def clock(step=1.0):
    ticks = itertools.count()
    return lambda: next(ticks) * step


def test_drift_that_is_larger_than_the_difference_does_not_decide():
    halving = halve_plans(list(TRUE), drifting(TRUE, drift=[1.0, 1.4, 0.8, 1.3]), steps=2, budget_seconds=1e9)
    assert halving.entries[0].plan == "dp=4" and halving.why == "one was left"
    assert next(entry for entry in halving.entries if entry.plan == "dp=2 tp=2").ratio == pytest.approx(1.08)


def test_the_slower_half_has_no_more_turns():
    seen = []
    halving = halve_plans(list(TRUE), drifting(TRUE, drift=[1.0], seen=seen), steps=2, budget_seconds=1e9)
    assert [entry.plan for entry in halving.entries] == list(TRUE)
    assert seen.count("dp=2 cp=2") == seen.count("dp=1 cp=4") == 2
    assert seen.count("dp=4") == seen.count("dp=2 tp=2") == 4 == halving.num_rounds


def test_plans_that_are_as_good_as_each_other_stay_until_the_end():
    equal = {"dp=4": 1.0, "dp=4 zero=1": 1.01, "dp=4 zero=2": 1.015}
    halving = halve_plans(list(equal), drifting(equal, drift=[1.0]), steps=1, budget_seconds=1e9, most_rounds=5)
    assert {len(entry.turns) for entry in halving.entries} == {5} and "5 rounds" in halving.why


def test_a_round_that_would_not_end_in_time_is_not_begun():
    halving = halve_plans(list(TRUE), drifting(TRUE, drift=[1.0]), steps=1, budget_seconds=0.5, now=clock())
    assert halving.num_rounds == 1 and "0.5 s for it were over" in halving.why
    assert halving.entries[0].plan == "dp=4"


def test_a_plan_that_fails_is_given_up_with_its_reason_and_comes_last():
    play = drifting(TRUE, drift=[1.0])

    def failing(plan, steps):
        if str(plan) == "dp=4":
            raise RunError("rank 1 has gone\nand more")
        return play(plan, steps)

    halving = halve_plans(list(TRUE), failing, steps=1, budget_seconds=1e9)
    assert halving.entries[0].plan == "dp=2 tp=2"
    assert (halving.entries[-1].plan, halving.entries[-1].problem) == ("dp=4", "rank 1 has gone")


def test_all_may_fail():
    def failing(plan, steps):
        raise RunError("no")

    halving = halve_plans(list(TRUE), failing, steps=1, budget_seconds=1e9)
    assert halving.why == "none could be tried" and all(entry.problem == "no" for entry in halving.entries)


def test_without_halving_all_have_all_turns():
    seen = []
    halve_plans(
        list(TRUE), drifting(TRUE, drift=[1.0], seen=seen), steps=1, budget_seconds=1e9, halves=False, most_rounds=4
    )
    assert {seen.count(plan) for plan in TRUE} == {4}


def test_who_has_a_turn_is_said_once():
    told = []
    play = drifting(TRUE, drift=[1.0])
    halve_plans(list(TRUE), play, steps=1, budget_seconds=1e9, halves=False, most_rounds=4, log=told.append)
    assert sorted(told) == sorted(f"trying {plan}" for plan in TRUE)


def test_one_lucky_turn_does_not_win():
    entries = [Entry("dp=2", turns=[1.0, 1.0, 1.0]), Entry("dp=2 zero=1", turns=[0.5, 1.1, 1.1])]
    rank(entries)
    assert entries[0].plan == "dp=2" and entries[0].ratio == 1.0 and entries[1].ratio > 1.05
