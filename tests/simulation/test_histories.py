"""Random histories of faults through the real decisions (``membership.step``, ``UpdateLog``), with everything else simulated.

What is checked (``oracles.py``): what was acknowledged is applied exactly once on every surviving replica, in the order of the
log; weights were never older than the rule allows, and each version that was read is a version of the log; no two centers were
accepted in one epoch; every work unit is in the log; and after the last fault the run finishes within a bound.

A planted bug must be found: those oracles can fail.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.elastic import membership
from shoal.elastic.view import Chain, drop
from simulation.histories import play

WAYS: dict[str, dict[str, Any]] = {
    "calm": {},
    "harsh": {"is_harsh": True},
    "forgetful": {"keeps_views": False},
    "harsh and forgetful": {"is_harsh": True, "keeps_views": False},
}
"""How dense the faults are, and whether a new center finds the last view where the old one wrote it or has to be told."""


@pytest.mark.parametrize("way", WAYS)
def test_histories(way: str) -> None:
    outcomes = [play(seed, **WAYS[way]) for seed in range(25)]
    assert sum(outcome.epochs for outcome in outcomes) > 120, "the faults did not change much"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_many_histories(way: str) -> None:
    for seed in range(10000, 13000):
        play(seed, faults=10, **WAYS[way])


def promote_what_joins(chains: Sequence[Chain], **more: Any) -> Any:
    """An unsynced replica counts as a backup."""
    return drop(
        [
            replace(chain, backups=(*chain.backups, *(one.server for one in chain.joining)), joining=())
            for chain in chains
        ],
        **more,
    )


# For each bug: where to look for it, and by which words it is found.
PLANTS: dict[str, tuple[dict[str, Any], str]] = {
    "answer a push before the backup has it": ({"aim": "s"}, r"has not got"),
    "answer a commit before the backup has it": ({"aim": "s"}, r"acknowledged and not in the log"),
    "promote an unsynced backup": ({"aim": "s"}, r"has nothing|has not got|not finished|did not apply"),
    "a dead worker keeps its work units": ({"aim": "w"}, r"not finished"),
    "give weights that are too old": ({}, r"was computed with version"),
    "accept old epochs": ({"aim": "s", "is_slow": True}, r"has nothing|has not got|not finished|did not apply"),
    "hear old epochs": ({"faults": 12}, r"has not got"),
    "give an epoch twice": ({"aim": "c", "is_slow": True}, r"two centers were accepted in epoch"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, words = PLANTS[plant]
    if plant == "promote an unsynced backup":
        monkeypatch.setattr(membership, "drop", promote_what_joins)
    for seed in range(100):
        try:
            play(seed, plants=frozenset({plant}), **more)
        except AssertionError as error:
            assert re.search(words, str(error).splitlines()[0]), error
            monkeypatch.undo()
            play(seed, **more)
            return
    raise AssertionError(f"{plant}: not found in 100 histories")
