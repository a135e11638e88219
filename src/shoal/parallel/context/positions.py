"""Which positions of a sequence a context-parallel rank holds, and the way there and back.

A sequence is cut into equal chunks, and a rank holds the concatenation of some of them::

    ring, cp=2:      chunks 0 1 2 3   rank 0: 0 3   rank 1: 1 2        causal work is the same on every rank
    alltoall, cp=2:  chunks 0 1       rank 0: 0     rank 1: 1          heads are dealt out, so work is the same anyway

Blocks are given more than their stream: rotary tables, position ids, masks, the memory of an encoder. Queries are this rank's
positions and masks speak of all keys, so ``cut_arguments`` treats them like this::

    tables (.., S, E), position ids (.., S), a second stream (B, S, D)     cut to this rank's positions
    masks (.., S, S), (.., 1, S), (B, S)                                   whole; attention takes its rows itself
    anything without a dim of S, such as a memory of another length       whole

A memory that happens to be as long as the stream is cut too; attention to it then goes around the ring, which is the same.
"""

from collections.abc import Sequence
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


_CACHES = frozenset({"past_key_values", "past_key_value", "layer_past"})


def sequence_dim_of(name: str, tensor: Tensor, *, whole: int, stream: Tensor, stream_dim: int) -> int | None:
    """The dim along which an argument is cut; None when it stays whole."""
    if tensor.ndim == 0 or "mask" in name or tensor.dtype == torch.bool:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.ndim - 1 if tensor.shape[-1] == whole else None
    is_table = any(word in name for word in ("position", "rotary", "rope", "freq", "cos", "sin"))
    is_like_stream = tensor.ndim == stream.ndim and tensor.shape[-1] == stream.shape[-1]
    if is_like_stream and tensor.shape[stream_dim] == whole:
        return stream_dim % tensor.ndim
    if tensor.shape[-1] == whole and not is_table:
        # Additive masks have their keys last.
        return None
    if tensor.ndim >= 2 and tensor.shape[-2] == whole:
        return tensor.ndim - 2
    if tensor.ndim == stream.ndim and tensor.shape[stream_dim] == whole:
        return stream_dim % tensor.ndim
    return None


def cut_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: Sequence[str],
    path: str,
    stream: Tensor,
    cuts_stream: bool,
    sequence_dim: int,
    whole: int,
    where: Positions,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block as this rank needs them.

    Args:
        args: by place.
        kwargs: by name.
        names: of the parameters of the block's forward.
        path: of the block, for messages.
        stream: which of the arguments is the stream.
        cuts_stream: the stream is still whole.
        sequence_dim: of the stream.
        whole: length of the whole sequence.
        where: this rank's positions.

    Raises:
        Refusal: an argument cannot be told from this rank's part of the stream, or a cache of keys is not empty.
    """
    local = where.local_length(whole)

    def cut(name: str, value: Any) -> Any:
        if value is stream:
            return where.cut(value, sequence_dim) if cuts_stream else value
        if name in _CACHES:
            return _without_cache(value, path)
        if isinstance(value, Tensor):
            dim = sequence_dim_of(name, value, whole=whole, stream=stream, stream_dim=sequence_dim)
            if dim is not None:
                return where.cut(value, dim)
            _check_apart(name, value, path=path, stream=stream, sequence_dim=sequence_dim, local=local, whole=whole)
            return value
        if type(value) in (tuple, list):
            return type(value)(cut(name, item) for item in value)
        if type(value) is dict:
            return {key: cut(str(key), item) for key, item in value.items()}
        return value

    # More arguments than names belong to *args.
    labels = [*names[: len(args)], *[""] * (len(args) - len(names))]
    placed = tuple(cut(name, value) for name, value in zip(labels, args, strict=True))
    return placed, {name: cut(name, value) for name, value in kwargs.items()}


def _without_cache(cache: Any, path: str) -> None:
    """Training and evaluation have no use for a cache of keys, and one would hold this rank's keys as if they were all."""
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    if isinstance(cache, (Tensor, tuple, list)) or length:
        raise Refusal(f"cp: block {path!r} was given keys of earlier positions; run whole sequences, or use cp=1")


def _check_apart(
    name: str, value: Tensor, *, path: str, stream: Tensor, sequence_dim: int, local: int, whole: int
) -> None:
    """Refuse another sequence that is as long as this rank's part: attention could not tell its keys from the stream's."""
    is_sequence = value.is_floating_point() and value.ndim == stream.ndim and "mask" not in name
    if is_sequence and local != whole and value.shape[sequence_dim] == local and value.shape[-1] == stream.shape[-1]:
        raise Refusal(
            f"cp: block {path!r} was given {name!r} of {local} positions, as many as this rank holds of the stream's {whole}: "
            f"the two cannot be told apart; pad it to {local + 1} positions or to {whole}, or use another cp"
        )
