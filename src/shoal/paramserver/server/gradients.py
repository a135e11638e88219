"""The gradients that a shard keeps until an update wants them or somebody says that none will.

A push is stored and not applied; it is idempotent by its push's identity. What is stored was checked first: its size and
dtype, its rows, and that every number in it is finite.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import RunError
from shoal.paramserver.log.queue import GONE_KEPT
from shoal.paramserver.records import PushId
from shoal.paramserver.sharding import Model, Piece, Shard
from shoal.paramserver.sparse import Rows, WrongGradient

REMEMBERED = 4096
"""Identities of gradients that were used or discarded and that are known for it when they are pushed again."""
_POOLED = 4


class NotFinite(RunError):
    """A gradient with NaN or infinity in it; it is not stored."""


class WorkerGone(RunError):
    """A push of a worker that has left; nobody would ever use it."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One gradient that waits for its update."""

    gradient: Tensor
    version: int
    """Version of the weights that it was computed with."""


class Gradients:
    """The waiting gradients of one shard."""

    def __init__(self, shard: Shard, *, model: Model, dtype: torch.dtype) -> None:
        self._shard = shard
        self._model = model
        self._dtype = dtype
        self._stored: dict[PushId, Stored] = {}
        self._retired: dict[PushId, None] = {}
        self._gone: dict[str, frozenset[int]] = {}
        # Buffers of used gradients: fresh memory costs more than the copy into it.
        self._pool: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, identity: PushId) -> bool:
        return identity in self._stored

    def __getitem__(self, identity: PushId) -> Stored:
        return self._stored[identity]

    @property
    def stored(self) -> Mapping[PushId, Stored]:
        """All that wait."""
        return self._stored

    @property
    def retired(self) -> Sequence[PushId]:
        """What was used or discarded, oldest first, as far as it is remembered."""
        return list(self._retired)

    @property
    def gone(self) -> Mapping[str, frozenset[int]]:
        """Workers that have left, oldest first as far as they are remembered, each with the numbers that it committed before."""
        return self._gone

    def store(self, identity: PushId, gradient: Tensor, version: int, rows: Mapping[str, Rows] | None = None) -> bool:
        """Keep a copy of a gradient; False when it is here already, or was.

        Args:
            identity: of the push.
            gradient: the flat gradient of the shard; without the parameters that are in ``rows``.
            version: of the weights it was computed with.
            rows: gradients of which only some rows are given, by parameter name.

        Raises:
            WrongGradient: it does not fit.
            NotFinite: it has NaN or infinity in it.
            WorkerGone: its worker has left without committing it.
        """
        if identity in self._stored or identity in self._retired:
            return False
        if identity.number not in self._gone.get(identity.worker, (identity.number,)):
            raise WorkerGone(f"worker {identity.worker} has left, and its push {identity.number} was not committed")
        kept = self._copy(gradient) if not rows else self._densify(gradient, rows)
        try:
            refuse_nonfinite(kept, self._shard, f"push {identity.number} of worker {identity.worker}")
        except NotFinite:
            self._recycle(kept)
            raise
        self._stored[identity] = Stored(gradient=kept, version=version)
        return True

    def retire(self, identities: Collection[PushId]) -> None:
        """These are used, or never will be."""
        for identity in identities:
            found = self._stored.pop(identity, None)
            if found is not None:
                self._recycle(found.gradient)
            self._retired[identity] = None
        while len(self._retired) > REMEMBERED:
            del self._retired[next(iter(self._retired))]

    def discard(self, worker: str, keep: Collection[int]) -> int:
        """A worker has left: drop what it pushed and never committed, and store no more of it; how many were dropped."""
        self._gone[worker] = frozenset(keep)
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        gone = [identity for identity in self._stored if identity.worker == worker and identity.number not in keep]
        self.retire(gone)
        return len(gone)

    def restore(
        self, stored: Mapping[PushId, Stored], retired: Sequence[PushId], gone: Mapping[str, frozenset[int]]
    ) -> None:
        """Take the place of what is here."""
        self._stored = dict(stored)
        self._gone = dict(gone)
        self._retired = dict.fromkeys(retired)

    def _buffer(self) -> Tensor:
        return self._pool.pop() if self._pool else torch.empty(self._shard.numel, dtype=self._dtype)

    def _recycle(self, buffer: Tensor) -> None:
        if len(self._pool) < _POOLED:
            self._pool.append(buffer)

    def _copy(self, gradient: Tensor) -> Tensor:
        self._expect("gradient", gradient, self._dtype, (self._shard.numel,))
        return self._buffer().copy_(gradient)

    def _densify(self, gradient: Tensor, rows: Mapping[str, Rows]) -> Tensor:
        foreign = sorted(rows.keys() - {piece.name for piece in self._shard.pieces})
        if foreign:
            raise WrongGradient(
                f"rows of {foreign[0]!r} were pushed to shard {self._shard.number}, which does not hold it"
            )
        dense = self._shard.numel - sum(piece.numel for piece in self._shard.pieces if piece.name in rows)
        self._expect("dense part of the gradient", gradient, self._dtype, (dense,))
        for piece in self._shard.pieces:
            if piece.name in rows:
                self._check_rows(piece, rows[piece.name])
        buffer, start = self._buffer(), 0
        for piece in self._shard.pieces:
            target = buffer[piece.offset : piece.offset + piece.numel]
            if piece.name in rows:
                width = math.prod(self._model[piece.name].shape[1:])
                given = rows[piece.name]
                target.zero_().view(-1, width)[given.indices - piece.start // width] = given.values.reshape(-1, width)
            else:
                target.copy_(gradient[start : start + piece.numel])
                start += piece.numel
        return buffer

    def _check_rows(self, piece: Piece, rows: Rows) -> None:
        shape = self._model[piece.name].shape
        width, count = math.prod(shape[1:]), len(rows.indices)
        self._expect(f"row numbers of {piece.name!r}", rows.indices, torch.int64, (count,))
        self._expect(f"rows of {piece.name!r}", rows.values, self._dtype, (count, *shape[1:]))
        first, last = piece.start // width, piece.stop // width
        # Increasing: the same row twice would make the sum depend on an order that nobody promised.
        if count and (rows.indices[0] < first or rows.indices[-1] >= last or not bool((rows.indices.diff() > 0).all())):
            raise WrongGradient(
                f"row numbers of {piece.name!r} must increase within {first} to {last - 1}, "
                f"which is what shard {self._shard.number} holds"
            )

    def _expect(self, what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise WrongGradient(
                f"the {what} for shard {self._shard.number} is {tensor.dtype} {tuple(tensor.shape)}, and must be {dtype} {shape}"
            )


def refuse_nonfinite(gradient: Tensor, shard: Shard, what: str) -> None:
    """Refuse NaN and infinity.

    Args:
        gradient: of the whole shard, flat.
        shard: which.
        what: the gradient, in people's words.

    Raises:
        NotFinite: names the first parameter that has some.
    """
    # A finite sum has finite parts, and is twice as fast as looking at each; only an overflow needs the second look.
    if math.isfinite(gradient.sum().item()) or _is_finite(gradient):
        return
    named = [piece for piece in shard.pieces if not _is_finite(gradient[piece.offset : piece.offset + piece.numel])]
    raise NotFinite(
        f"{what} has NaN or infinity in the gradient of {named[0].name!r} "
        f"({len(named)} of {len(shard.pieces)} parameters of shard {shard.number}); it is not stored"
    )


def _is_finite(tensor: Tensor) -> bool:
    return all(math.isfinite(end.item()) for end in torch.aminmax(tensor))
