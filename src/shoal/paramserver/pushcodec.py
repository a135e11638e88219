"""Pushes with fewer bytes: how a worker encodes its gradient for each shard, and how a server decodes it.

A tensor with several dims and enough elements (``compression.min_elements``) goes through the plan's codec, slice by slice as the
shards hold it; everything else goes as it is. Worker and server derive the codec from the plan and the recipe, each for itself.

    payload   | piece 0 | piece 1 | ...        in the shard's order: a codec's bytes, or the elements themselves

Random choices are drawn by (seed, work unit, slice), so who sends a push again sends the same bytes. What a codec lost stays with
the worker and is added to its next push (error feedback). It moves on only with a push that is kept: one that comes to nothing is
computed again by somebody, and must not be counted twice. A worker that starts anew begins with nothing kept.

Under bsp a push after whose step a checkpoint is due brings the residual of what it sends, for the checkpoint:

    payload   | piece 0 | piece 1 | ... | residual of the compressed pieces, float32

What a server stores is decoded, so updates, backups, checkpoints and aggregation know of none of this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.compression.build import build_codec
from shoal.compression.codec import Codec, Encoded, nbytes, pack, unpack
from shoal.compression.config import CompressionConfig, has_residual
from shoal.compression.feedback import compensate
from shoal.compression.keyed import codec_key
from shoal.core.compressrule import CompressRule
from shoal.paramserver.messages import Packed
from shoal.paramserver.sharding import Model, Piece, Shard, ShardMap
from shoal.paramserver.sparse import WrongGradient

_SELECTED_BYTES = 8
"""Of an element that is sent with its place."""
_WITH_PLACES = ("topk", "threshold")
_BY_RANGES = ("topk", "threshold", "randk")


@dataclass(frozen=True)
class PushCodec:
    """The codec of a run's pushes: the same value on both sides.

    Args:
        rule: the plan's.
        config: the recipe's ``[compression]``.
        model: the trained parameters.
        seed: of the run.
        num_shares: work units of a step.
    """

    rule: CompressRule
    config: CompressionConfig
    model: Model
    seed: int
    num_shares: int
    saved_every: int = 0
    """Steps between checkpoints that have residuals; 0: none has."""
    last_step: int = 0
    """Steps of the run, after which there is a checkpoint as well."""

    @cached_property
    def codec(self) -> Codec:
        """Of one slice."""
        codec = build_codec(self.rule, self.config)
        assert codec is not None, f"{self.rule.kind} is refused before a run"
        return codec

    def is_on(self, unit: int) -> bool:
        """True when a push that begins with this work unit is compressed."""
        return unit // self.num_shares >= self.rule.start

    def is_saved_after(self, step: int) -> bool:
        """True when the checkpoint after so many steps has what workers keep."""
        return self.saves_residuals and (step % self.saved_every == 0 or step == self.last_step)

    @property
    def saves_residuals(self) -> bool:
        """True when checkpoints of this run have what workers keep."""
        return bool(self.saved_every) and self.keeps_residual

    def kept_numel(self, shard: Shard) -> int:
        """Elements of a worker's residual of a shard."""
        return sum(piece.numel for piece, is_packed in self.pieces(shard) if is_packed)

    def split_kept(self, payload: Tensor, packed: Packed, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """The bytes of the push, and the residual behind them, where there is one.

        Raises:
            WrongGradient: there should be one and is not, or nobody's.
        """
        if packed.owner is None:
            return payload, None
        start = payload.numel() - 4 * self.kept_numel(shard)
        if not self.saves_residuals or start < 0 or not 0 <= packed.owner < self.num_shares:
            raise WrongGradient(
                f"a push to shard {shard.number} brings a residual of worker {packed.owner}: none is due"
            )
        return payload[:start], payload[start:].clone().view(torch.float32)

    def compresses(self, name: str) -> bool:
        """True for tensors that go through the codec."""
        spec = self.model[name]
        return len(spec.shape) >= 2 and spec.numel >= max(1, self.config.min_elements)

    @property
    def keeps_residual(self) -> bool:
        """True when what is lost is kept."""
        return has_residual(self.rule, self.config)

    def pieces(self, shard: Shard) -> Iterator[tuple[Piece, bool]]:
        """The slices of a shard in its order, each with whether it is compressed."""
        for piece in shard.pieces:
            yield piece, piece.numel > 0 and self.compresses(piece.name)

    def num_bytes(self, shard: Shard, itemsize: int = 4) -> int:
        """Bytes of a push to a shard, by formula; of a codec without a fixed size, at most."""
        return sum(
            nbytes(self.codec, piece.numel, self._offset(piece)) if is_packed else piece.numel * itemsize
            for piece, is_packed in self.pieces(shard)
        )

    def encode(self, flat: Tensor, piece: Piece, unit: int) -> Encoded:
        """One slice as it is sent."""
        return self.codec.encode(flat, key=self._key(piece, unit), offset=self._offset(piece))

    def decode(self, encoded: Encoded, piece: Piece) -> Tensor:
        """What a server makes of it."""
        return self.codec.decode(encoded, piece.numel)

    def unpack(self, payload: Tensor, packed: Packed, shard: Shard) -> Tensor:
        """The gradient of a shard from the bytes that came.

        Raises:
            WrongGradient: they are of another codec, or not as many as they should be, or name elements that are not there.
        """
        if packed.codec != str(self.rule):
            raise WrongGradient(f"a push came as {packed.codec!r}, and this run has compress={self.rule}")
        listed = list(self.pieces(shard))
        if len(packed.sizes) != sum(is_packed for _, is_packed in listed):
            raise WrongGradient(
                f"{len(packed.sizes)} compressed tensors came for shard {shard.number}, which has "
                f"{sum(is_packed for _, is_packed in listed)}"
            )
        sizes = iter(packed.sizes)
        lengths = [self._checked(next(sizes), piece) if is_packed else 4 * piece.numel for piece, is_packed in listed]
        if payload.numel() != sum(lengths):
            raise WrongGradient(f"{sum(lengths)} bytes are due for shard {shard.number}, and {payload.numel()} came")
        found, start = torch.empty(shard.numel), 0
        for (piece, is_packed), length in zip(listed, lengths, strict=True):
            # A copy: a slice of bytes may begin anywhere, and elements may not.
            own = payload[start : start + length].clone()
            start += length
            target = found[piece.offset : piece.offset + piece.numel]
            if is_packed:
                target.copy_(self.decode(self._read(own, piece, packed.unit), piece))
            else:
                target.copy_(own.view(torch.float32))
        return found

    def _checked(self, size: int, piece: Piece) -> int:
        most = nbytes(self.codec, piece.numel, self._offset(piece))
        if size != most if self.codec.has_fixed_size else not 0 <= size <= most or size % _SELECTED_BYTES:
            due = f"{most}" if self.codec.has_fixed_size else f"at most {most}, {_SELECTED_BYTES} an element,"
            raise WrongGradient(f"{piece.key} is {due} bytes as {self.rule}, and {size} came")
        return size

    def _read(self, own: Tensor, piece: Piece, unit: int) -> Encoded:
        if self.codec.has_fixed_size:
            found = unpack(self.codec, own, piece.numel, key=self._key(piece, unit), offset=self._offset(piece))
        else:
            middle = own.numel() // 2
            found = Encoded((own[:middle].view(torch.float32), own[middle:].view(torch.int32)))
        if self.rule.kind in _WITH_PLACES:
            places = found.payload[1]
            if places.numel() and (places[0] < 0 or places[-1] >= piece.numel or not bool((places.diff() > 0).all())):
                raise WrongGradient(f"places of {piece.key} must increase within 0 to {piece.numel - 1}")
        return found

    def _key(self, piece: Piece, unit: int) -> int:
        return codec_key(self.seed, unit, f"{piece.name}@{piece.start}")

    def _offset(self, piece: Piece) -> int:
        """Blocks are those of the whole tensor; a choice among elements is one among those of the slice."""
        return 0 if self.rule.kind in _BY_RANGES else piece.start


class PushCompressor:
    """A worker's side, with what it keeps.

    Args:
        codec: of the run.
        shard_map: how gradients are cut.
        index: the worker's place among the workers.
    """

    def __init__(self, codec: PushCodec, shard_map: ShardMap, index: int = 0) -> None:
        self._codec, self._shards = codec, shard_map.shards
        self.index = index % codec.num_shares
        self.num_kept_bytes = 0
        """Of residuals that were sent for checkpoints."""
        self._residual: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    @property
    def asks_for_residual(self) -> bool:
        """True when a checkpoint may have what this worker is to begin with."""
        return self._codec.saves_residuals

    def take(self, shard: int, residual: Tensor) -> None:
        """Begin with what a checkpoint has of a shard, as ``PushCodec.split_kept`` gives it."""
        pieces = [piece for piece, is_packed in self._codec.pieces(self._shards[shard]) if is_packed]
        parts = torch.split(residual, [piece.numel for piece in pieces])
        self._residual |= {piece.key: part.clone() for piece, part in zip(pieces, parts, strict=True)}

    def residual_norm(self) -> float | None:
        """Of what is kept; None where nothing is. A push that is under way replaces it by another, and changes none in place."""
        kept = list(self._residual.values())
        return float(torch.stack([tensor.norm() for tensor in kept]).norm()) if kept else None

    def num_kept(self, shard: int) -> int:
        """Elements of what is kept of a shard."""
        return self._codec.kept_numel(self._shards[shard])

    @torch.no_grad()
    def encode(self, gradient: Tensor, spans: Sequence[slice], unit: int) -> list[tuple[Packed, Tensor]] | None:
        """A whole gradient, for each shard what is sent; None where this push is not compressed.

        Args:
            gradient: all shards, one after the other.
            spans: of each shard in it.
            unit: the first work unit that it is of.
        """
        self._next = {}
        if not self._codec.is_on(unit):
            return None
        return [
            self._encode_shard(gradient[span], shard, unit) for shard, span in zip(self._shards, spans, strict=True)
        ]

    def settle(self, *, is_kept: bool) -> None:
        """The last push is part of the run, or is not: then the residual is what it was before it."""
        if is_kept:
            self._residual |= self._next
        self._next = {}

    def _encode_shard(self, flat: Tensor, shard: Shard, unit: int) -> tuple[Packed, Tensor]:
        codec, parts, sizes = self._codec, [], []
        for piece, is_packed in codec.pieces(shard):
            own = flat[piece.offset : piece.offset + piece.numel]
            if not is_packed:
                parts.append(own.contiguous().view(torch.uint8))
                continue
            given = compensate(own, self._residual.get(piece.key))
            encoded = codec.encode(given, piece, unit)
            if codec.rule.kind == "randk" and not bool(given.isfinite().all()):
                # The places that were drawn may all be good ones, and a bad gradient must not arrive as a good one.
                encoded.payload[0].fill_(float("nan"))
            if codec.keeps_residual:
                self._next[piece.key] = given - codec.decode(encoded, piece)
            parts.append(pack(encoded))
            sizes.append(encoded.nbytes)
        is_saved = codec.is_saved_after(unit // codec.num_shares + 1)
        if is_saved:
            kept = [self._next[piece.key].view(torch.uint8) for piece, is_packed in codec.pieces(shard) if is_packed]
            parts += kept
            self.num_kept_bytes += sum(map(len, kept))
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        owner = self.index if is_saved else None
        return Packed(codec=str(codec.rule), unit=unit, sizes=tuple(sizes), owner=owner), payload
