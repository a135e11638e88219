"""The weights of a shard while they are sent: whoever reads them keeps them as they are, and an update waits for nobody.

A link may be slow, and a reader may stop in the middle. So weights are lent and not locked: an update of weights that somebody
still reads is made in other memory, to which they are copied first. Where nobody reads, as between two steps of ``bsp``, it is
made in its place and nothing is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class _Loan:
    weights: Tensor
    num_readers: int = 0


class Lending:
    """Who reads the memory of one shard. Called from one thread."""

    def __init__(self) -> None:
        self._loan: _Loan | None = None
        """Of the memory that is current."""
        # Of a reader that was overtaken by an update: fresh memory costs more than the copy into it.
        self._spare: Tensor | None = None

    @contextmanager
    def lend(self, weights: Tensor) -> Iterator[Tensor]:
        """The current weights, which stay as they are until the end of the block."""
        if self._loan is None:
            self._loan = _Loan(weights)
        loan = self._loan
        assert loan.weights is weights, "the current weights are where they were lent last"
        loan.num_readers += 1
        try:
            yield weights
        finally:
            loan.num_readers -= 1
            if not loan.num_readers and loan is not self._loan:
                self._spare = weights

    def take_other(self, weights: Tensor) -> Tensor | None:
        """Memory for the current weights to change in, which they are in from then on; None: nobody reads them where they are."""
        if self._loan is None or not self._loan.num_readers:
            return None
        self._loan, spare, self._spare = None, self._spare, None
        return torch.empty_like(weights) if spare is None else spare
