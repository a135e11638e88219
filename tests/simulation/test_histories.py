"""Random histories of faults through the real decisions (``membership.step``, ``UpdateLog``), with everything else simulated.

What is checked (``oracles.py``): what was acknowledged is applied exactly once on every surviving replica, in the order of the
log; weights were never older than the rule allows, and each version that was read is a version of the log; no two centers were
accepted in one epoch; every work unit is in the log; everyone goes back to the checkpoint only when a shard has no copy left; and
after the last fault the run finishes within a bound.

Where views are not written down ("forgetful", as in the product) servers, workers and centers may all die before anybody who
knows the last view is heard. Then the run begins anew from the newest checkpoint, and what was acknowledged since is lost. The
promise is for the death of one copy of a shard at a time, so that is no fault as long as a shard did lose all its copies, which
is checked (``Run.published``); nothing else is excused, and nothing at all where views are written down.

A planted bug must be found: those oracles can fail.
"""

import re
from collections.abc import Collection, Sequence
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


def test_everyone_dies_and_the_view_with_them() -> None:
    """The run begins anew at its checkpoint; the updates that were acknowledged later had no copy left."""
    run = play(10014, faults=10, **WAYS["harsh and forgetful"]).run
    forgotten = [view for view in run.views if view.epoch < run.forgotten][-1]
    assert not {one.id for one in forgotten} & {one.id for one in run.views[-1]}
    assert run.bases[0].update_log["log"], "it did not begin at a checkpoint"


def test_a_view_that_a_copy_knows_is_not_forgotten() -> None:
    """That everyone died is the only excuse: with one server left alive the same view is a fault."""
    run = play(10014, faults=10, **WAYS["harsh and forgetful"]).run
    anew = next(view for view in run.views if view.epoch == run.forgotten)
    before = [view for view in run.views if view.epoch < anew.epoch]
    known = dict.fromkeys(range(len(anew.chains)), before[-1])
    replace(run, views=list(before), led=known).published(anew)
    run.world.by_id[before[-1].chains[0].primary] = run.world.by_id[anew.chains[0].primary]
    with pytest.raises(AssertionError, match="was forgotten, and every shard had a copy"):
        replace(run, views=list(before), led=known).published(anew)


def promote_what_joins(chains: Sequence[Chain], **more: Any) -> Any:
    """An unsynced replica counts as a backup."""
    return drop(
        [
            replace(chain, backups=(*chain.backups, *(one.server for one in chain.joining)), joining=())
            for chain in chains
        ],
        **more,
    )


def lose_what_a_backup_has(chains: Sequence[Chain], *, living: Collection[str], epoch: int) -> Any:
    """A shard whose primary died counts as lost."""
    kept, _ = drop(chains, living=living, epoch=epoch)
    return kept, tuple(shard for shard, chain in enumerate(chains) if chain.primary not in living)


DROPS = {
    "promote an unsynced backup": promote_what_joins,
    "go back although there is a backup": lose_what_a_backup_has,
}

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
    "go back although there is a backup": ({"aim": "s"}, r"went back to the checkpoint, and every shard had a copy"),
    "tell a new center of no view": (
        {"keeps_views": False, "faults": 12},
        r"was forgotten, and every shard had a copy|has nothing|has not got|not finished|did not apply|not in the log",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, words = PLANTS[plant]
    if plant in DROPS:
        monkeypatch.setattr(membership, "drop", DROPS[plant])
    for seed in range(100):
        try:
            play(seed, plants=frozenset({plant}), **more)
        except AssertionError as error:
            assert re.search(words, str(error).splitlines()[0]), error
            monkeypatch.undo()
            play(seed, **more)
            return
    raise AssertionError(f"{plant}: not found in 100 histories")
