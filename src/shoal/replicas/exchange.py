"""Sums over islands, in the order of islands whatever carries the bytes.

An island's rank exchanges with the ranks of equal coordinates in the other islands only, so each of them sums its own part of
the model and nothing is gathered.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.ordered import sum_in_order_
from shoal.compression.exchange import CompressedSum
from shoal.core.errors import RunError

BUCKET_ELEMENTS = 4 * 2**20
"""Elements that are packed into one message: large enough for any link, small beside a model."""


LEFT_OUT = -1.0
"""The share of an island that is not in a round."""
CHUNK = 1 << 17
"""Elements that a rule works on at once: they stay in a core's cache from one operation to the next."""


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape in small flat parts, for rules on elements; whole where one is not contiguous."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(tensor.view(-1), CHUNK) for tensor in tensors), strict=True)


class Bucket:
    """Memory for one message, kept from round to round: fresh pages at each cost as much as the sum. For one thread."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of one type as one flat tensor: one that is contiguous as it is, others copied."""
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return tensors[0].detach().view(-1)
        like, size = tensors[0], sum(tensor.numel() for tensor in tensors)
        kept = self._kept
        if kept is None or kept.numel() < size or kept.dtype != like.dtype or kept.device != like.device:
            kept = self._kept = torch.empty(size, dtype=like.dtype, device=like.device)
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=kept[:size])


def unpack_(flat: Tensor, tensors: Sequence[Tensor], *, divisor: int = 1) -> None:
    """Put what was packed back into its tensors, divided on the way: memory is read and written once for both."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        if divisor != 1:
            torch.div(part.view_as(tensor), divisor, out=tensor)
        elif part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part.view_as(tensor))


def mean_over_islands_(tensors: Sequence[Tensor], channel: Channel) -> None:
    """Replace tensors by their mean over islands: the sum in the order of islands, divided by their number."""
    room = Bucket()
    for bucket in buckets(tensors):
        flat = room.pack(bucket)
        sum_in_order_(flat, channel)
        unpack_(flat, bucket, divisor=channel.size)


def sum_over_islands_(tensors: Sequence[Tensor], channel: Channel) -> None:
    """Replace tensors by their sum over islands, in the order of islands."""
    room = Bucket()
    for bucket in buckets(tensors):
        flat = room.pack(bucket)
        sum_in_order_(flat, channel)
        unpack_(flat, bucket)


class Membership:
    """Who takes part in a round and with what share: told by all islands at its start, and fixed from then on.

    An island whose change is not finite tells ``LEFT_OUT`` and is left out, by all ranks alike. One that has seen no sample tells
    0: it is in the round and weighs nothing.

    Args:
        shares: of each island, ``LEFT_OUT`` for those that are left out.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = tuple(shares)

    @property
    def left_out(self) -> tuple[int, ...]:
        """The islands that are not in the round."""
        return tuple(island for island, share in enumerate(self.shares) if share < 0)

    @property
    def total(self) -> float:
        """The shares of those that are in it."""
        return sum(share for share in self.shares if share > 0)

    @property
    def count(self) -> int:
        """Islands that are in it."""
        return len(self.shares) - len(self.left_out)


def tell_shares(channel: Channel, own: float, *, step: int, device: torch.device) -> Membership:
    """Tell the other islands this one's share, and hear theirs.

    Args:
        channel: to the other islands.
        own: ``LEFT_OUT`` to be left out.
        step: at whose end the round is held: its name, which must be the same everywhere.
        device: of the weights.

    Raises:
        RunError: islands are in different rounds, or all of them would be left out.
    """
    told = torch.zeros(channel.size, 2, dtype=torch.float64, device=device)
    told[channel.rank, 0], told[channel.rank, 1] = own, step + 1
    # One term of each sum is not zero: any order gives the same.
    channel.all_reduce_(told)
    rows = told.tolist()
    steps = sorted({int(row[1]) for row in rows})
    if len(steps) > 1:
        places = ", ".join(f"island {island} of step {int(row[1])}" for island, row in enumerate(rows))
        raise RunError(f"islands are in different rounds: {places}; this is a bug, please report it")
    found = Membership([row[0] for row in rows])
    if not found.count:
        raise RunError(
            f"the round after step {steps[0]} has no island whose weights are finite; resume from an earlier checkpoint with a "
            "lower optim.lr or with optim.clip"
        )
    return found


class MeanChange:
    """The mean of the islands' changes: the sum in the order of islands, by the number of those in the round, or by samples.

    Args:
        channel: to the other islands.
        share: of this island: ``LEFT_OUT`` where its weights are not finite.
        by_samples: shares are samples, and weigh; else they are 1.
        step: at whose end the round is held.
        sums: adds changes up compressed, over the same channel; left out, they go as they are.
        room: for messages, kept by the policy.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        share: float,
        by_samples: bool,
        step: int,
        sums: CompressedSum | None = None,
        room: Bucket | None = None,
    ) -> None:
        self._channel, self._share, self._by_samples, self._step = channel, share, by_samples, step
        self._sums = sums
        self._room = room or Bucket()
        self.members = Membership([1.0] * channel.size)
        """Who was in it; known after the first message."""

    def messages(self, changes: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the changes by their mean, a message at a time."""
        device = next((change.device for change in changes.values()), torch.device("cpu"))
        self.members = tell_shares(self._channel, self._share, step=self._step, device=device)
        yield
        if self._sums is not None:
            self._sum_compressed(self._sums, changes)
            return
        for bucket in buckets(list(changes.values())):
            flat = self._room.pack(bucket)
            self._weigh_(flat)
            sum_in_order_(flat, self._channel)
            unpack_(flat, bucket, divisor=1 if self._by_samples else self.members.count)
            yield

    def _sum_compressed(self, sums: CompressedSum, changes: Mapping[str, Tensor]) -> None:
        for change in changes.values():
            self._weigh_(change)
        # Draws and the first compressed round are by the step: it is in every checkpoint, and rounds may be of fragments.
        sums.begin_step(self._step)
        sums.reduce_(changes)
        sums.commit()
        for change in changes.values() if not self._by_samples else ():
            change.div_(self.members.count)

    def _weigh_(self, flat: Tensor) -> None:
        # Zeros and not a product: nothing times what is not finite is not nothing.
        if self._share <= 0:
            flat.zero_()
        elif self._by_samples:
            flat.mul_(self._share / self.members.total)

    def finish(self, changes: Mapping[str, Tensor]) -> Membership:
        """All messages, here and now."""
        for _ in self.messages(changes):
            pass
        return self.members


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type that follow each other, in messages of about ``BUCKET_ELEMENTS``."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
