"""Samples that a user names, by their numbers and by ranges of them. No torch."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from shoal.core.errors import RequestError
from shoal.data.order import Ids

_RANGE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


class Chosen:
    """Samples of the training split, 0 being its first one. One that is named several times is there as often.

    Args:
        named: whole numbers, and ranges such as "100:200", which ends before 200.

    Raises:
        ValueError: one of them is neither, or there is none.
    """

    def __init__(self, named: Sequence[int | str]) -> None:
        if isinstance(named, str | bytes) or not len(named):
            raise ValueError(f"replay_from is {named!r}, and names no sample; {_FIX}")
        ranges = np.array([_range_of(one) for one in named], dtype=np.int64)
        self._starts, self._stops = ranges[:, 0], ranges[:, 1]
        self._ends = np.cumsum(self._stops - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def at(self, places: Ids) -> Ids:
        """(n,): the samples at these places among the chosen ones."""
        found = np.searchsorted(self._ends, places, side="right")
        return np.asarray(self._stops[found] - (self._ends[found] - places), dtype=np.int64)

    def describe(self) -> str:
        """Their number and a hash of which they are."""
        ranges = np.stack([self._starts, self._stops]).astype("<i8").tobytes()
        return f"{len(self)} chosen ones ({xxhash.xxh3_64(ranges).hexdigest()})"

    def refuse_beyond(self, num_samples: int) -> None:
        """Refuse samples that there are not.

        Raises:
            RequestError: names the highest one, and how many samples the training split has.
        """
        if int(self._stops.max()) > num_samples:
            raise RequestError(
                f"replay_from names sample {int(self._stops.max()) - 1}, and the training split has {num_samples} samples; "
                f"give numbers from 0 to {num_samples - 1}"
            )


_FIX = 'give numbers of training samples and ranges of them, such as [3, 17, "100:200"]'


def _range_of(named: Any) -> tuple[int, int]:
    if isinstance(named, int | np.integer) and not isinstance(named, bool) and 0 <= named < 10**18:
        return int(named), int(named) + 1
    found = _RANGE.fullmatch(named) if isinstance(named, str) else None
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(f"replay_from has {named!r}; {_FIX}")
    return int(found[1]), int(found[2])
