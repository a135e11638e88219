"""Shuffled epochs of data in blocks that are dear to fetch: each block is fetched once, and batches are mixed all the same.

The blocks are permuted, cut into windows of W blocks, and the rows of each window are permuted. Like the order of a full
shuffle it is computed and not stored: a function of (seed, epoch, first rows of the blocks, position). What is kept is one
number for each block, never one for each row, and a run resumes anywhere at once.

    blocks          0 1 2 3 4 5 6         seven blocks
    permuted        5 2 | 0 6 | 3 1 | 4   windows of two
    rows            of 5 and 2 mixed, then of 0 and 6 mixed, ...

Batches are drawn from one window, so rows of one block meet more often than they would by chance. Expected of data that is sorted
by its label: chi2 per degree of freedom 1 + (B / W) (1 - W / blocks) for batches of B rows. W of five batches or more keeps it
below 1.2; ``sampling/quality.py`` measures it.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.data.order import Ids, permute

BLOCK_SAMPLES = 64
"""Samples of a block, where the source has none of its own."""


def even_blocks(num_samples: int, size: int = BLOCK_SAMPLES) -> Ids:
    """The first sample of each block of ``size``, and the number of samples behind the last."""
    return np.append(np.arange(0, num_samples, size, dtype=np.int64), np.int64(num_samples))


def check_blocks(starts: NDArray[np.int64], num_samples: int) -> Ids:
    """The first samples of blocks, when they are that.

    Raises:
        RequestError: they do not begin at 0, do not rise, or do not end with the number of samples.
    """
    found = np.asarray(starts, dtype=np.int64)
    if found.ndim != 1 or len(found) < 2 or found[0] != 0 or found[-1] != num_samples or (np.diff(found) < 1).any():
        raise RequestError(
            f"the blocks of the data must begin at sample 0, rise, and end with the {num_samples} samples; they are given as "
            f"{len(found.reshape(-1))} numbers from {found.reshape(-1)[:1].tolist()} to {found.reshape(-1)[-1:].tolist()}"
        )
    return found


class Windowed:
    """Samples shuffled in windows of blocks. A ``Sampling``.

    Args:
        seed: of the run.
        starts: the first sample of each block, and the number of samples behind the last.
        window: blocks of a window.
    """

    def __init__(self, seed: int, starts: NDArray[np.int64], window: int) -> None:
        if window < 1:
            raise RequestError(f"data.window is {window} blocks, and must be 1 or more")
        self._seed, self._starts, self._window = seed, starts, window
        self._num_blocks = len(starts) - 1
        self._epoch = -1
        self._blocks: Ids = np.empty(0, dtype=np.int64)
        """The blocks of the epoch in their order."""
        self._ends: Ids = np.empty(0, dtype=np.int64)
        """(blocks + 1,): samples of the epoch before each of these blocks."""
        self._firsts: Ids = np.empty(0, dtype=np.int64)
        """(windows + 1,): samples of the epoch before each window."""
        self._start, self._known = 0, np.empty(0, dtype=np.int64)

    def count(self, epoch: int) -> int:
        """Every sample once."""
        return int(self._starts[-1])

    def ids(self, epoch: int, taken: slice) -> Ids:
        """See ``Sampling``. Worked out some thousand positions at a time, as far as the window goes."""
        is_known = epoch == self._epoch and self._start <= taken.start and taken.stop <= self._start + len(self._known)
        if not is_known:
            self._begin(epoch)
            stop = min(max(taken.stop, taken.start + 4096), self.count(epoch))
            self._start, self._known = taken.start, self._ids_at(taken.start, stop)
        return self._known[taken.start - self._start : taken.stop - self._start]

    def at(self, epoch: int, positions: Ids) -> Ids:
        """See ``OnceEach``."""
        self._begin(epoch)
        windows = np.searchsorted(self._firsts, positions, side="right") - 1
        found = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(windows).tolist():
            chosen = windows == number
            found[chosen] = self._mix(number, positions[chosen] - self._firsts[number])
        return found

    def blocks_ahead(self, epoch: int, position: int, count: int) -> Ids:
        """The blocks of the window at a position and of those after it, ``count`` at most, in the order in which they are met."""
        self._begin(epoch)
        first = self._window_of(position) * self._window
        return self._blocks[first : first + count]

    def _begin(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        order = np.arange(self._num_blocks, dtype=np.int64)
        self._blocks = permute(derive_key("blocks", self._seed), epoch, self._num_blocks, order)
        sizes = (self._starts[1:] - self._starts[:-1])[self._blocks]
        self._ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        self._firsts = np.append(self._ends[: -1 : self._window], self._ends[-1])
        self._epoch, self._known = epoch, np.empty(0, dtype=np.int64)

    def _window_of(self, position: int) -> int:
        return int(np.searchsorted(self._firsts, position, side="right")) - 1

    def _ids_at(self, start: int, stop: int) -> Ids:
        """The samples at positions from ``start`` to ``stop`` of the epoch, one window after the other."""
        found: list[Ids] = []
        number = self._window_of(start)
        while start < stop:
            first, end = int(self._firsts[number]), int(self._firsts[number + 1])
            places = np.arange(start - first, min(stop, end) - first, dtype=np.int64)
            found.append(self._mix(number, places))
            start, number = min(stop, end), number + 1
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _mix(self, number: int, places: Ids) -> Ids:
        """The samples at these places of a window, whose blocks lie one behind the other before they are mixed."""
        size = int(self._firsts[number + 1] - self._firsts[number])
        places = permute(derive_key("window", self._seed, number), self._epoch, size, places)
        first = number * self._window
        ends = self._ends[first : first + self._window + 1] - self._ends[first]
        which = np.searchsorted(ends, places, side="right") - 1
        rows: Ids = self._starts[self._blocks[first + which]] + (places - ends[which])
        return rows


def describe_window(starts: Sequence[int] | NDArray[np.int64], window: int, global_batch: int) -> str | None:
    """What to say of a window that mixes worse than 1.3 allows; None of one that is wide enough."""
    blocks = len(starts) - 1
    expected = expected_chi2(blocks=blocks, window=window, batch=global_batch)
    if expected <= 1.3:
        return None
    wanted = min(blocks, math.ceil(global_batch / 0.3))
    return (
        f"data.window of {window} blocks mixes batches of {global_batch} poorly (chi2 {expected:.2f} of a perfect 1.00 where the "
        f"data is sorted); a window of {wanted} would do"
    )


def expected_chi2(*, blocks: int, window: int, batch: int) -> float:
    """Of batches of data that is sorted by its label: chi2 per degree of freedom, of which 1 is a perfect shuffle's."""
    inside = min(window, blocks)
    return 1.0 + batch / inside * (1.0 - inside / blocks)
