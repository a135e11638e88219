"""Ranks that are slower than the others, and why: a pure function of how long each phase of each step kept each rank busy.

In a synchronous step everybody ends together, so a step's length names nobody: the slow rank is the one that does *not* wait.
What counts is therefore the time that a rank was busy, without its waits for others. Each step is compared with the median of
the other ranks at the same step, so that long and short steps, which all ranks share, do not matter; over the window the mean
of the middle of these ratios is taken, so that a single pause does not matter either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["compute", "data", "network"]
REASONS: tuple[Reason, ...] = ("compute", "data", "network")
WINDOW = 20
"""Steps that are looked at, the newest ones."""
LEAST = 5
"""With fewer steps nothing is said."""
_LEAST_SECONDS = 1e-6
_TRIM = 0.2
"""The share of ratios that is left out at either end."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """What kept one rank busy in one step, in seconds. Time in which it waited for other ranks is in none of them."""

    compute: float
    """Forward and backward passes and the update."""
    data: float = 0.0
    """Waiting for its own batch."""
    network: float = 0.0
    """Its own sends and receives, from when the other side was there too."""

    @property
    def busy(self) -> float:
        """All of it."""
        return self.compute + self.data + self.network


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank beside the others."""

    rank: str
    factor: float
    """How many times as long as the median of the others it is busy."""
    reason: Reason
    """The phase that takes most of the difference."""
    seconds: float
    """How much longer than the others' median that phase is, per step."""

    def __str__(self) -> str:
        return f"{self.rank} is busy {self.factor:.2f} times as long as the others ({self.reason}: +{self.seconds:.3g} s a step)"


def find_stragglers(steps: Sequence[Mapping[str, Phases]], *, factor: float) -> list[Straggler]:
    """The ranks that are slower than the others by a factor over the newest steps, the slowest first.

    Args:
        steps: what kept each rank busy, step by step; each of a view's ranks at each of its steps.
        factor: from which on a rank is named (``elastic.straggler_factor``).
    """
    # Of one that no phase keeps longer than the others, only the ratios are large: it is noise.
    return [one for one in order_ranks(steps) if one.factor >= factor and one.seconds > _LEAST_SECONDS]


def order_ranks(steps: Sequence[Mapping[str, Phases]]) -> list[Straggler]:
    """All ranks of the newest steps, the slowest first; none while there are too few steps or ranks to compare."""
    window = list(steps)[-WINDOW:]
    # A rank that was not there all the time is not compared: the others did its share.
    ranks = sorted(set.intersection(*(set(step) for step in window))) if window else []
    if len(window) < LEAST or len(ranks) < 2:
        return []
    ratios: dict[str, list[float]] = {rank: [] for rank in ranks}
    excess: dict[str, dict[Reason, list[float]]] = {rank: {reason: [] for reason in REASONS} for rank in ranks}
    for step in window:
        usual = _median_of_others({rank: step[rank].busy for rank in ranks})
        for rank in ranks:
            ratios[rank].append(step[rank].busy / max(usual[rank], 1e-9))
        for reason in REASONS:
            seconds = {rank: float(getattr(step[rank], reason)) for rank in ranks}
            usual = _median_of_others(seconds)
            for rank in ranks:
                excess[rank][reason].append(seconds[rank] - usual[rank])
    found = []
    for rank in ranks:
        more = {reason: _middle(excess[rank][reason]) for reason in REASONS}
        reason = max(REASONS, key=lambda one: more[one])
        found.append(Straggler(rank=rank, factor=_middle(ratios[rank]), reason=reason, seconds=more[reason]))
    return sorted(found, key=lambda one: (-one.factor, one.rank))


def _median_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """For each rank the median of all others. One sort serves them all."""
    ordered = sorted(values, key=lambda rank: (values[rank], rank))
    count = len(ordered) - 1
    low, high = (count - 1) // 2, count // 2

    def value(place: int, at: int) -> float:
        # The rank in this place is left out: those behind it move up by one.
        return values[ordered[at + (at >= place)]]

    return {rank: (value(place, low) + value(place, high)) / 2 for place, rank in enumerate(ordered)}


def _middle(values: Sequence[float]) -> float:
    """The mean without the largest and the smallest ones."""
    cut = int(len(values) * _TRIM)
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)
