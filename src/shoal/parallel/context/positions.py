"""Which positions of a sequence a context-parallel rank holds, and the way there and back.

A sequence is cut into equal chunks, and a rank holds the concatenation of some of them::

    ring, cp=2:      chunks 0 1 2 3   rank 0: 0 3   rank 1: 1 2        causal work is the same on every rank
    alltoall, cp=2:  chunks 0 1       rank 0: 0     rank 1: 1          heads are dealt out, so work is the same anyway
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel
from shoal.core.errors import Refusal


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The positions of one rank."""

    kind: str
    """``ring`` or ``alltoall``."""
    rank: int
    degree: int

    @property
    def num_chunks(self) -> int:
        """Equal chunks that the whole sequence is cut into."""
        return 2 * self.degree if self.kind == "ring" else self.degree

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of this rank, in the order in which it holds them."""
        if self.kind == "ring":
            return (self.rank, 2 * self.degree - 1 - self.rank)
        return (self.rank,)

    def of_rank(self, rank: int) -> "Positions":
        """The same for another rank."""
        return Positions(kind=self.kind, rank=rank, degree=self.degree)

    def local_length(self, length: int) -> int:
        """How many of ``length`` positions this rank holds.

        Raises:
            Refusal: they cannot be dealt out evenly.
        """
        if length % self.num_chunks:
            below = length - length % self.num_chunks
            nearest = f"{below} or {below + self.num_chunks}" if below else str(self.num_chunks)
            raise Refusal(
                f"a sequence of {length} cannot be cut into {self.num_chunks} equal chunks, as cp={self.degree} "
                f"cp_kind={self.kind} needs; use a sequence of {nearest}, or another cp"
            )
        return length // self.degree

    def select(self, length: int, device: torch.device | None = None) -> Tensor:
        """The numbers of this rank's positions, in the order in which it holds them."""
        size = self.local_length(length) // len(self.chunks)
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in self.chunks])

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions of a tensor that holds all of them along ``dim``; its backward pass puts zeros elsewhere."""
        size = self.local_length(whole.size(dim)) // len(self.chunks)
        parts = [whole.narrow(dim, chunk * size, size) for chunk in self.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, locals_: tuple[Tensor, ...], dim: int) -> Tensor:
        """The whole tensor from every rank's part, in the order of ranks."""
        chunks: dict[int, Tensor] = {}
        for rank, local in enumerate(locals_):
            numbers = self.of_rank(rank).chunks
            chunks.update(zip(numbers, local.chunk(len(numbers), dim), strict=True))
        return torch.cat([chunks[number] for number in range(self.num_chunks)], dim)


class _GatherSequence(torch.autograd.Function):
    """Forward: everyone's positions become the whole sequence. Backward: the sum over ranks, of it this rank's positions."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, positions: Positions, channel: Channel) -> Tensor:
        """Gather, then put chunks in their order."""
        ctx.dim, ctx.positions, ctx.channel = dim, positions, channel
        whole = local.new_empty((channel.size, *local.shape))
        channel.all_gather(local.contiguous().flatten(), whole.flatten(), [local.numel()] * channel.size)
        return positions.join(whole.unbind(0), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """What comes after the gather may differ from rank to rank, so each rank's gradient is a part of the sum."""
        channel: Channel = ctx.channel
        parts = [ctx.positions.of_rank(rank).cut(grad, ctx.dim) for rank in range(channel.size)]
        stacked = torch.stack(parts)
        own = torch.empty_like(stacked[0])
        channel.reduce_scatter(stacked.flatten(), own.flatten(), [own.numel()] * channel.size)
        return own, None, None, None


def gather_sequence(local: Tensor, dim: int, positions: Positions, channel: Channel) -> Tensor:
    """The whole sequence on every rank, from each rank's positions along ``dim``.

    The algebra: let the run's loss be the sum over ranks of what each rank computes from the gathered tensor. Its gradient by a
    position is then the sum over ranks, which the backward pass forms and cuts. Where every rank goes on to compute the same
    whole loss, that sum would count it ``cp`` times, so each rank's loss is to be divided by ``cp``
    (``ContextLayout.loss_factor``).
    """
    gathered: Tensor = _GatherSequence.apply(local, dim, positions, channel)  # type: ignore[no-untyped-call]
    return gathered
