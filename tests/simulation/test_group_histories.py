"""Random histories of an elastic run through the real decisions (``group.step``, ``choose_step``, ``deal``, ``Lease``).

Everything else is simulated: hosts with agents, ranks that take steps together, a network that delays and is cut, kills, power
cuts, pauses, slow ranks, joins and leaves at any message. What is checked (``group/oracles.py``): every sample is in exactly
one step, no update is applied twice, and what anybody holds after a step is what the undisturbed run has (chains of hashes);
one membership for each epoch, and no rank in two; a host that is cut off has stopped when others go on without it, so there
are never two lineages; the state of survivors and their copies is used wherever it is whole; after the last fault the run
finishes within a bound.

A planted bug must be found: those oracles can fail.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.elastic import commit, group, groupview
from shoal.elastic.commit import Holding, Resumption, Shard, choose_step
from shoal.elastic.groupchanges import Publish
from simulation.group.histories import play

WAYS: dict[str, dict[str, Any]] = {
    "calm": {},
    "harsh": {"is_harsh": True, "faults": 14},
    "one failure at a time, ZeRO": {"is_single": True, "zero": True},
    "more logical replicas than present ones": {"is_dealt": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_histories(way: str) -> None:
    outcomes = [play(seed, **WAYS[way]) for seed in range(5)]
    assert sum(outcome.epochs for outcome in outcomes) > 25, "the faults did not change much"
    assert sum(outcome.run.num_live_resumptions for outcome in outcomes) > 25


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_many_histories(way: str) -> None:
    for seed in range(10000, 12000):
        play(seed, **WAYS[way])


def go_back_too_far(reports: Sequence[Holding]) -> Resumption | None:
    """Of the steps that are whole, the smallest."""
    found = choose_step(reports)
    if found is None:
        return None
    steps = sorted({one.step for report in reports for one in (*report.own, *report.copies)})
    for step in steps:
        kept = [
            replace(
                report,
                own=tuple(one for one in report.own if one.step == step),
                copies=tuple(one for one in report.copies if one.step == step),
            )
            for report in reports
        ]
        first = choose_step(kept)
        if first is not None:
            return first
    return found


def mix_two_steps(reports: Sequence[Holding]) -> Resumption | None:
    """A shard of the step before counts as one of the newest step."""

    def newer(shards: tuple[Shard, ...], step: int) -> tuple[Shard, ...]:
        return tuple(replace(one, step=step) for one in shards)

    steps = [one.step for report in reports for one in report.own]
    if not steps:
        return choose_step(reports)
    return choose_step([replace(one, own=newer(one.own, max(steps))) for one in reports])


def forget_copies(reports: Sequence[Holding]) -> Resumption | None:
    """Copies do not count."""
    return choose_step([replace(one, copies=()) for one in reports])


def deal_floors(num_logical: int, num_present: int) -> tuple[tuple[int, ...], ...]:
    """Everybody gets the same number, and the rest is left out."""
    each = num_logical // num_present
    return tuple(tuple(range(place * each, (place + 1) * each)) for place in range(num_present))


_STEP = group.step


def publish_twice(state: Any, event: Any) -> Any:
    """A retry is published under the epoch that there is."""
    after, instructions = _STEP(state, event)
    if not any(isinstance(one, Publish) and one.is_retry for one in instructions):
        return after, instructions
    view = replace(after.view, epoch=state.epoch)
    changed = [replace(one, view=view) if isinstance(one, Publish) else one for one in instructions]
    return replace(after, epoch=state.epoch, view=view), changed


def hurry(state: Any, event: Any) -> Any:
    """A silent host is left out after half its lease."""
    after, instructions = _STEP(replace(state, wanted=replace(state.wanted, lease_seconds=0.75)), event)
    return after, instructions


def forget_the_dead_agent(state: Any, event: Any) -> Any:
    """An agent that was started again is taken for the one before."""
    return _STEP(state, replace(event, agent="") if hasattr(event, "agent") else event)


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "go back further than needed": (commit, "choose_step", go_back_too_far),
    "mix two steps": (commit, "choose_step", mix_two_steps),
    "forget copies": (commit, "choose_step", forget_copies),
    "leave the rest of the batch out": (groupview, "deal", deal_floors),
    "retry under the same epoch": (group, "step", publish_twice),
    "leave a host out before its lease is over": (group, "step", hurry),
    "an agent that came back is taken for the first": (group, "step", forget_the_dead_agent),
}

# For each bug: where to look for it, and by which words it is found.
PLANTS: dict[str, tuple[dict[str, Any], str]] = {
    "steps without a lease": ({"aim": "isolate"}, r"two lineages|lost its lease|took step"),
    "leave a host out before its lease is over": ({"aim": "isolate"}, r"two lineages|lost its lease|took step"),
    "a view that is over has a lease": ({"is_single": True, "zero": True}, r"lost its lease"),
    "take the view that comes last": ({"is_late": True}, r"went from epoch|another membership|not finished"),
    "do not wait for the last": ({}, r"has the samples"),
    "sum over epochs": (
        {"is_late": True, "aim": "kill", "faults": 14},
        r"has the samples|not those of the undisturbed run",
    ),
    "the data go on when a step fails": ({}, r"has the samples"),
    "apply before all have the sum": (
        {"zero": False, "aim": "kill", "is_late": True},
        r"nothing whole is left|goes back",
    ),
    "one buffer instead of two": ({"is_single": True, "zero": True}, r"nothing whole is left|goes back"),
    "drop the old before all have loaded": ({"zero": True, "faults": 12}, r"nothing whole is left|goes back"),
    "go back further than needed": ({"zero": True}, r"goes back"),
    "mix two steps": ({}, r"not those of the undisturbed run|KeyError|not finished"),
    "forget copies": ({"is_single": True, "zero": True}, r"nothing whole is left"),
    "leave the rest of the batch out": ({"is_dealt": True}, r"has the samples"),
    "retry under the same epoch": ({"aim": "pause"}, r"two memberships in epoch"),
    "an agent that came back is taken for the first": ({"aim": "host"}, r"not finished|gave up"),
}

RARE = {"a view that is over has a lease": 10358}
"""Bugs that were found by the long search only, and the histories that showed them."""


QUICK = (
    "do not wait for the last",
    "the data go on when a step fails",
    "leave the rest of the batch out",
    "mix two steps",
)
"""Bugs of the kinds that others stand for; the others are looked for by the long search."""


@pytest.mark.parametrize(
    "plant", [plant if plant in QUICK else pytest.param(plant, marks=pytest.mark.soak) for plant in PLANTS]
)
def test_a_planted_bug_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, words = PLANTS[plant]
    if plant in PATCHES:
        monkeypatch.setattr(*PATCHES[plant])
    first = RARE.get(plant, 0)
    for seed in range(first, first + 100):
        try:
            play(seed, plants=frozenset({plant}), **more)
        except AssertionError as error:
            assert re.search(words, str(error).splitlines()[0]), error
            monkeypatch.undo()
            play(seed, **more)
            return
    raise AssertionError(f"{plant}: not found in 100 histories")
