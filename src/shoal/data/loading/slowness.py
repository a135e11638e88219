"""Which rank's reader holds the others up: found from the time that each rank's loading took over some steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FACTOR = 3.0
"""So many times what the others take, in the middle."""
_WORTH_S = 5e-3
"""Of a step: less than that more is nobody's concern."""


@dataclass(frozen=True, kw_only=True)
class SlowReader:
    """A rank whose loading takes much longer than that of the others."""

    rank: int
    seconds: float
    """That its loading took."""
    usual: float
    """The others', in the middle."""


def find_slow_reader(seconds: Sequence[float], steps: int) -> SlowReader | None:
    """The slowest rank, where it is slower than the others by a factor that matters.

    Args:
        seconds: that loading took, by rank.
        steps: in which it did.
    """
    if len(seconds) < 2 or steps == 0:
        return None
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    usual = statistics.median(one for place, one in enumerate(seconds) if place != rank)
    slowest = seconds[rank]
    if slowest <= _FACTOR * usual or (slowest - usual) / steps <= _WORTH_S:
        return None
    return SlowReader(rank=rank, seconds=slowest, usual=usual)
