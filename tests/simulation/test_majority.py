"""Thousands of histories of an election; a hundred in every run of the tests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.elastic.election import majority
from simulation.majority import run_history


def test_histories() -> None:
    elections = sum(len(run_history(seed).elected) for seed in range(100))
    assert elections > 300


@pytest.mark.soak
def test_many_histories() -> None:
    for seed in range(1000, 11000):
        run_history(seed, faults=20)


def forget_promises(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, candidate, now: False


def count_from_the_answer(original: Callable[..., Any]) -> Callable[..., Any]:
    """A lease that begins later than the question was sent."""
    return lambda state, voter, sent: original(state, voter, sent + 0.5)


def start_without_keeping_still(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda name, **rest: replace(original(name, **rest), still_until=float("-inf"))


# A seed for each at which it is found; the others are many, and this is fast.
PLANTS = {
    "_is_bound": (forget_promises, 24),
    "_count": (count_from_the_answer, 15),
    "begin": (start_without_keeping_still, 46),
}


@pytest.mark.parametrize("where", PLANTS)
def test_a_planted_bug_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, seed = PLANTS[where]
    run_history(seed)
    monkeypatch.setattr(majority, where, plant(getattr(majority, where)))
    with pytest.raises(AssertionError, match="two leases hold"):
        run_history(seed)


def test_a_ballot_that_is_not_kept_is_found() -> None:
    with pytest.raises(AssertionError, match="two leaders"):
        run_history(7, plant="ballot is not kept")
