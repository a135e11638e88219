"""Samples of the past again, between the new ones: so that what came before is not forgotten while data grows or moves.

A share of an epoch's positions is given to samples that the run has met before, or to chosen ones, evenly between the others.
Which one is drawn by (seed, epoch, position), so that a run resumes anywhere with the same ones, on any number of processes, and
nothing is kept. The others come in the order that they would have without, each once.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.chosen import Chosen
from shoal.data.order import Ids, uniform
from shoal.data.sampling.samplers import OnceEach

_FINEST = 1000
"""Shares are taken as fractions with no larger denominator, so that positions of any epoch are whole numbers."""


class Replayed:
    """An order with samples of the past between its own. A ``Sampling``.

    Args:
        fresh: the order of each sample once.
        seed: of the run.
        share: of all positions, that are given to the past.
        last: draw from so many samples before this one in the order; None draws from everything that the epoch has met, and after
            the first epoch from all of the data.
        chosen: draw from these, whether the epoch has met them or not, in the place of the past.

    Raises:
        RequestError: the share is none, or a chosen sample is not there.
    """

    def __init__(
        self, fresh: OnceEach, *, seed: int, share: float, last: int | None = None, chosen: Chosen | None = None
    ) -> None:
        if not 0 < share < 1:
            raise RequestError(f"data.replay is {share:g}, and must be a share above 0 and below 1")
        if chosen is not None:
            chosen.refuse_beyond(fresh.count(0))
        self.fresh = fresh
        self._seed, self._last, self._chosen = seed, last, chosen
        self._share = Fraction(share).limit_denominator(_FINEST)

    def count(self, epoch: int) -> int:
        """New samples and replayed ones."""
        share = self._share
        return self.fresh.count(epoch) * share.denominator // (share.denominator - share.numerator)

    def ids(self, epoch: int, taken: slice) -> Ids:
        """See ``Sampling``."""
        positions = np.arange(taken.start, taken.stop, dtype=np.int64)
        before, is_replayed = self._replayed_before(positions)
        fresh = positions - before
        found = np.empty(len(positions), dtype=np.int64)
        new = fresh[~is_replayed]
        if len(new):
            found[~is_replayed] = self.fresh.ids(epoch, slice(int(new[0]), int(new[-1]) + 1))
        found[is_replayed] = self._of_the_past(epoch, positions[is_replayed], fresh[is_replayed])
        return found

    def replayed_ids(self, epoch: int, taken: slice) -> Ids:
        """The samples that are replayed at these positions of an epoch, in their order."""
        positions = np.arange(taken.start, taken.stop, dtype=np.int64)
        before, is_replayed = self._replayed_before(positions)
        return self._of_the_past(epoch, positions[is_replayed], (positions - before)[is_replayed])

    def _replayed_before(self, positions: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """How many positions before each are replayed ones, and whether it is one itself."""
        over, under = self._share.numerator, self._share.denominator
        before = positions * over // under
        return before, (positions + 1) * over // under > before

    def _of_the_past(self, epoch: int, positions: Ids, fresh: Ids) -> Ids:
        """Samples that come again at these positions, before which so many new ones had been."""
        drawn = uniform(positions, "replay", self._seed, epoch)
        if self._chosen is not None:
            return self._chosen.at((drawn * len(self._chosen)).astype(np.int64))
        if epoch and self._last is None:
            # All of the data was met in the epochs before, in whatever order.
            return self.fresh.at(epoch, (drawn * self.fresh.count(epoch)).astype(np.int64))
        depth = fresh if self._last is None else np.minimum(self._last, fresh)
        return self.fresh.at(epoch, fresh - 1 - (drawn * depth).astype(np.int64))
