"""Sums over ranks that go on from round to round, in the order of logical replicas (``core/logical.py``).

The sum of a round begins with that of the rounds before it: ``((carry + rank 0) + rank 1) + ...``. The first rank of the channel
adds the carry to its own summand before the ranks are added, which is the same sum bit for bit and asks nothing of whoever moves
the bytes, except that it adds in the order of ranks. A rank that has no summand in a round gives -0.0, which changes no number:
+0.0 would make a +0.0 of a -0.0.
"""

from collections.abc import Sequence

from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.ordered import sum_in_order_

NOTHING = -0.0
"""What is added where there is nothing to add."""


class CarriedSum:
    """One tensor's sum over the ranks of a channel and over rounds. Every rank calls each method, in the same order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._carry: Tensor | None = None
        """Of the rounds so far; the first rank alone needs it."""

    def add_(self, flat: Tensor) -> Tensor:
        """Add a round's summands, in place: ``flat`` is then the sum of all rounds so far, on every rank."""
        self._begin(flat)
        sum_in_order_(flat, self._channel)
        if self._channel.rank == 0:
            self._carry = flat.clone()
        return flat

    def scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Add the last round's summands and put this rank's slice of the sum into ``own``; see ``Channel.reduce_scatter``."""
        self._begin(whole)
        self._carry = None
        return self._channel.reduce_scatter(whole, own, counts)

    def _begin(self, flat: Tensor) -> None:
        if self._carry is not None:
            flat.add_(self._carry)


def sum_rounds(summands: Sequence[Tensor], channel: Channel) -> Tensor:
    """The sum of every round's tensor over ranks and rounds; where there is one round, whatever the channel has for it."""
    if len(summands) == 1:
        return channel.all_reduce_(summands[0])
    total = CarriedSum(channel)
    return [total.add_(summand) for summand in summands][-1]
