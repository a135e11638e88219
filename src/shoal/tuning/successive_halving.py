"""Plans tried for real steps against each other, in rounds, until one is clearly best. No torch.

A machine that slows down by a third for a minute slows whatever runs in that minute, and two plans that are timed one after the
other are then not comparable. So in a round every plan that is left has a turn of a few steps, in an order that is shuffled; a
plan's time is compared with the others' *of the same round*; and what counts is the median of those ratios over rounds. After
every second round the slower half goes, but nobody who is within ``TIE`` of the best: successive halving (Jamieson and Talwalkar,
2016, arXiv:1502.07943), with drift taken out.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan

TIE = 1.02
"""Plans whose median ratios are within this are as good as each other."""
_ROUNDS_BETWEEN = 2
_MOST_ROUNDS = 12

Play = Callable[[Plan, int], Sequence[float]]
"""Takes so many real steps of a plan: the seconds of each."""


@dataclass
class Entry:
    """A plan and what its turns took."""

    plan: str
    turns: list[float] = field(default_factory=list)
    """The median step of each round that it was in."""
    problem: str = ""
    """Why it could not be tried; empty where it could."""
    ratio: float = float("inf")
    """Its median step over that of the best, in the rounds that both were in."""

    @property
    def seconds(self) -> float:
        """The median over its turns."""
        return statistics.median(self.turns) if self.turns else float("inf")


@dataclass(frozen=True, kw_only=True)
class Halving:
    """How it ended."""

    entries: tuple[Entry, ...]
    """Those that were in the last round by their ratio, then those that left, the last to leave first, then those that failed."""
    num_rounds: int
    seconds: float
    why: str
    """Why it ended, in words."""


def halve_plans(
    plans: Sequence[str],
    play: Play,
    *,
    steps: int,
    budget_seconds: float,
    halves: bool = True,
    most_rounds: int = _MOST_ROUNDS,
    log: Callable[[str], None] = lambda line: None,
    now: Callable[[], float] = time.monotonic,
) -> Halving:
    """Try plans against each other. A plan that fails is given up with its reason; the others go on.

    Args:
        plans: what to try.
        play: takes steps of one.
        steps: of a turn.
        budget_seconds: after which no round is begun that would not end in time, but for the first.
        halves: let slow plans go; otherwise all stay until the last round.
        most_rounds: after which it ends.
        log: given a line when a plan has its first turn.
        now: the time.
    """
    started, shuffle = now(), random.Random(0).shuffle
    alive, left = [Entry(plan) for plan in plans], list[Entry]()
    num_rounds, why = 0, f"{most_rounds} rounds were over"
    while num_rounds < most_rounds:
        begun = now()
        order = list(alive)
        shuffle(order)
        for entry in order:
            # Once: every plan has a turn in every round.
            if num_rounds == 0:
                log(f"trying {entry.plan}")
            _take_turn(entry, play, steps)
        num_rounds += 1
        left = [entry for entry in alive if entry.problem] + left
        alive = [entry for entry in alive if not entry.problem]
        rank(alive)
        if halves and num_rounds % _ROUNDS_BETWEEN == 0:
            gone = _slower_half(alive)
            left = gone + left
            alive = [entry for entry in alive if entry not in gone]
        if len(alive) < (2 if halves else 1):
            why = "one was left" if alive else "none could be tried"
            break
        if now() - started + (now() - begun) > budget_seconds:
            why = f"the {budget_seconds:g} s for it were over"
            break
    left.sort(key=lambda entry: bool(entry.problem))
    return Halving(entries=(*alive, *left), num_rounds=num_rounds, seconds=now() - started, why=why)


def rank(entries: list[Entry]) -> None:
    """Sort plans that were in the same rounds by the median of their ratios, and note the ratio to the best."""
    if not entries:
        return
    middles = [statistics.median(turns) for turns in zip(*(entry.turns for entry in entries), strict=True)]
    for entry in entries:
        entry.ratio = statistics.median(turn / middle for turn, middle in zip(entry.turns, middles, strict=True))
    entries.sort(key=lambda entry: entry.ratio)
    best = entries[0].ratio
    for entry in entries:
        entry.ratio /= best


def _slower_half(ranked: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in ranked[(len(ranked) + 1) // 2 :] if entry.ratio > TIE]


def _take_turn(entry: Entry, play: Play, steps: int) -> None:
    try:
        entry.turns.append(statistics.median(play(Plan.parse(entry.plan), steps)))
    except (RequestError, RunError) as failure:
        entry.problem = str(failure).splitlines()[0]
