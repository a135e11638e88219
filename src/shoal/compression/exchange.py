"""Sums over ranks with fewer bytes: tensors of one step in, their sum over the ranks of a channel out, what was lost kept.

    exchange.begin_step(step)
    exchange.reduce_({"w": gradient, ...})     # in place, the same names on every rank
    exchange.commit()                       # the step was taken; otherwise the state stays that from before it

Collectives are called here and nowhere else in this room, from the thread that trains and in one order: torch's own PowerSGD hook
starts them from callbacks, and of two buckets they cross between ranks. Every sum is made in the order of ranks, so a run has
the bits of one process that applies the same codec to each replica's gradient and adds up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.ordered import has_rank_order, sum_in_order_
from shoal.comm.trafficcounter import ExchangeMeter, TrafficCounts
from shoal.compression.build import build_back, build_codec
from shoal.compression.codec import Codec, Encoded
from shoal.compression.config import CompressionConfig, has_residual
from shoal.compression.dgc import DGCState, accumulate, ratio_at, send
from shoal.compression.keyed import codec_key
from shoal.compression.layout import (
    Owned,
    Piece,
    TensorPart,
    block_of,
    cut_as_owned,
    cut_block,
    cut_evenly,
    factor_rank,
    is_compressed,
    message_bytes,
    way_of,
)
from shoal.compression.messages import pack_all, slots, unpack_all
from shoal.compression.powersgd import (
    multiply_left,
    multiply_right,
    orthogonalise,
    product,
    revive_right,
    start_right,
)
from shoal.compression.sparse import TopK
from shoal.compression.traffic import BUCKET_ELEMENTS, Link, sum_traffic
from shoal.core.compressrule import CompressRule

State = dict[str, dict[str, Tensor]]
"""Tensors by what they are (``residual``, ``sum_residual``, ...) and by parameter."""


class CompressedSum:
    """One rank's part in compressed sums, and the state that they need.

    Args:
        parts: what each rank of the channel holds of each parameter, by name; all of them alike.
        rule: the plan's ``compress``.
        config: the ``[compression]`` section.
        channel: the ranks that sum.
        seed: of the run.
        device: where the tensors are.
        owned: which elements each rank needs the sum of, under ZeRO; None where all ranks need all.
    """

    def __init__(
        self,
        parts: Mapping[str, TensorPart],
        rule: CompressRule,
        config: CompressionConfig,
        channel: Channel,
        *,
        seed: int,
        device: torch.device,
        owned: Owned | None = None,
    ) -> None:
        self.parts = dict(sorted(parts.items()))
        self.rule, self.config, self.channel, self.seed = rule, config, channel, seed
        self.owned = owned
        self.step = 0
        self.meter = ExchangeMeter()
        """What was sent so far."""
        self.numbers: dict[str, Tensor] = {}
        """Further numbers and tensors that belong to the state, by name, the same on all ranks."""
        self.sent_counts: list[int] = []
        """Elements of each tensor that each rank sent at the last sum, where only the values tell (``threshold``)."""
        self._summed = frozenset(self.parts)
        self.device = device
        self._way = way_of(rule)
        self._codec = build_codec(rule, config)
        self._has_residual = has_residual(rule, config)
        self.compressed = {name: part for name, part in self.parts.items() if is_compressed(part.shape, rule, config)}
        self._pieces: list[list[Piece]] = []
        self._back: Codec | None = None
        """What the sum is encoded by on its way back; None where it stays with its owner or comes back as it is."""
        if self._way == "blocks":
            assert self._codec is not None
            if owned is None:
                self._back = build_back(rule, config)
                self._pieces = cut_evenly(self.compressed, channel.size, cut_block(self._codec, self._back))
            else:
                self._pieces = cut_as_owned(self.compressed, owned, block_of(self._codec))
        self._own_ranges: dict[str, tuple[int, int]] = {}
        """Of the tensors that this rank adds up a slice of: the slice's first element and its end."""
        for piece in self._pieces[channel.rank] if self._pieces else ():
            start, _ = self._own_ranges.get(piece.name, (piece.start, 0))
            self._own_ranges[piece.name] = (start, piece.stop)
        self._state: State = {}
        self._pending: State = {}
        self._spare: State = {}
        self._buffers: dict[str, Tensor] = {}
        self.reset()

    @property
    def is_compressed(self) -> bool:
        """True at a step that is compressed; before the rule's first one everything is summed as it is."""
        return self.step >= self.rule.start

    @property
    def answers_both_ways(self) -> bool:
        """The sum is encoded on its way back as well."""
        return self._back is not None

    # --- a step

    def begin_step(self, number: int) -> None:
        """Sums from now on are of step ``number``; what the last one would have kept is forgotten unless it was committed."""
        self.step = number
        self.forget()

    @torch.no_grad()
    def reduce_(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace tensors by their sums over the ranks, in the order of ranks. Under ZeRO only the owned elements are defined.

        Args:
            tensors: by name; the same names on all ranks, of which some may be left out.
        """
        flats = {name: _flatten(tensors[name]) for name in self.parts if name in tensors}
        self._summed = frozenset(flats)
        with self.meter.measuring(self.channel.traffic, self.channel.axis, self.channel.size):
            self._sum(flats)
        # Under ZeRO a sum is made and not told: what it is told as is the weights, later.
        dense = sum(flat.nbytes for flat in flats.values())
        self.meter.add_dense(dense if self.owned is None else dense // 2, self.channel.size)
        for name, flat in flats.items():
            if flat.data_ptr() != tensors[name].data_ptr():
                tensors[name].copy_(flat.view_as(tensors[name]))

    def _sum(self, flats: Mapping[str, Tensor]) -> None:
        chosen = self.compressed if self.is_compressed else {}
        self._sum_dense([flat for name, flat in flats.items() if name not in chosen])
        large = {name: flat for name, flat in flats.items() if name in chosen}
        if large:
            match self._way:
                case "blocks":
                    self._sum_blocks(large)
                case "selected":
                    self._sum_selected(large)
                case "random":
                    self._sum_random(large)
                case "factors":
                    self._sum_factors(large)

    def commit(self) -> None:
        """The step was taken: what its sums lost is kept for the next."""
        for what, found in self._pending.items():
            for name, tensor in found.items():
                # Memory changes hands and tensors stay the same objects: whoever holds one sees the new state.
                kept, before = self._state[what][name], self._state[what][name].detach()
                kept.data = tensor
                self._spare[what][name] = before
        self._pending = {}

    def forget(self) -> None:
        """The step was not taken: the state stays that from before it."""
        for what, found in self._pending.items():
            self._spare[what].update(found)
        self._pending = {}

    def forecast_traffic(self) -> TrafficCounts:
        """What the last sum should have moved."""
        link = Link(axis=self.channel.axis, num_ranks=self.channel.size, has_order=has_rank_order(self.channel))
        return sum_traffic(
            self.parts,
            self.rule,
            self.config,
            link,
            step=self.step,
            owned=self.owned,
            names=self._summed,
            sent_counts=self.sent_counts,
        )

    # --- its state

    def reset(self) -> None:
        """The state of a run's start."""
        self.forget()
        for number in self.numbers.values():
            number.zero_()
        self._state = {}
        if self.rule.kind == "dgc":
            self._state = {"momentum": self._zeros(), "unsent": self._zeros()}
        elif self._has_residual:
            self._state = {"residual": self._zeros()}
        if self._has_residual and self.answers_both_ways:
            self._state["sum_residual"] = {
                name: torch.zeros(stop - start, device=self.device) for name, (start, stop) in self._own_ranges.items()
            }
        if self._way == "factors":
            self._state["right"] = {name: self._first_right(name, part) for name, part in self.compressed.items()}
        self._spare = {
            what: {name: torch.empty_like(tensor) for name, tensor in found.items()}
            for what, found in self._state.items()
        }

    def own_state(self) -> State:
        """What differs from rank to rank: live, flat tensors of what the rank holds of each parameter."""
        return {what: dict(found) for what, found in self._state.items() if what not in ("sum_residual", "right")}

    def shared_state(self) -> dict[str, dict[str, tuple[Tensor, int, int]]]:
        """What the ranks have together: live tensors, the row at which each lies in the whole, and the whole's rows."""
        found: dict[str, dict[str, tuple[Tensor, int, int]]] = {}
        if "sum_residual" in self._state:
            found["sum_residual"] = {
                name: (tensor, self._own_ranges[name][0], self.parts[name].size)
                for name, tensor in self._state["sum_residual"].items()
            }
        if "right" in self._state:
            found["right"] = {name: (right, 0, right.shape[0]) for name, right in self._state["right"].items()}
        return found

    @property
    def num_state_bytes(self) -> int:
        """Bytes of the state, and of the next one, which is made beside it; single numbers are not counted."""
        kept = (self._state, self._pending, self._spare)
        further = sum(tensor.nbytes for tensor in self.numbers.values() if tensor.ndim)
        return further + sum(tensor.nbytes for state in kept for found in state.values() for tensor in found.values())

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros(part.size, device=self.device) for name, part in self.compressed.items()}

    def _first_right(self, name: str, part: TensorPart) -> Tensor:
        _, cols, rank = factor_rank(part.shape, int(self.rule.number))
        return start_right(cols, rank, codec_key(self.seed, 0, name), self.device)

    def _next(self, what: str, name: str) -> Tensor:
        """The memory for a tensor of the next state: that of the last one but one, whose pages are there already."""
        kept = self._spare[what].pop(name)
        self._pending.setdefault(what, {})[name] = kept
        return kept

    # --- the ways

    def _sum_dense(self, flats: Sequence[Tensor]) -> None:
        for bucket in dense_buckets(flats):
            if len(bucket) == 1:
                sum_in_order_(bucket[0], self.channel)
                continue
            packed = torch.cat(bucket)
            sum_in_order_(packed, self.channel)
            for flat, total in zip(bucket, torch.split(packed, [len(flat) for flat in bucket]), strict=True):
                flat.copy_(total)

    def _compensate_(self, flats: Mapping[str, Tensor]) -> None:
        """``p = g + e``, in the gradient's own memory, which the sum takes afterwards."""
        if self._has_residual:
            for name, flat in flats.items():
                flat.add_(self._state["residual"][name])

    def _keys(self, pieces: Sequence[Piece], who: str) -> list[int]:
        return [codec_key(self.seed, self.step, f"{piece.name}/{who}") for piece in pieces]

    def _sum_blocks(self, flats: Mapping[str, Tensor]) -> None:
        codec, rank = self._codec, self.channel.rank
        assert codec is not None
        pieces = [[piece for piece in owner if piece.name in flats] for owner in self._pieces]
        self._compensate_(flats)
        kept = {name: self._next("residual", name) for name, flat in flats.items()} if self._has_residual else {}
        counts = [message_bytes(codec, owner) for owner in pieces]
        messages = torch.split(self._kept("messages", sum(counts), torch.uint8), counts)
        for owner, message in zip(pieces, messages, strict=True):
            keys = self._keys(owner, str(rank))
            for piece, key, slot in zip(owner, keys, slots(codec, message, owner), strict=True):
                given = flats[piece.name][piece.start : piece.stop]
                encoded = codec.encode(given, key=key, offset=piece.offset, out=slot)
                if kept:
                    lost = kept[piece.name][piece.start : piece.stop]
                    torch.sub(given, codec.decode(encoded, piece.numel, lost), out=lost)
        received = torch.tensor_split(self._kept("received", len(counts) * counts[rank], torch.uint8), len(counts))
        self.channel.all_to_all(messages, received)
        totals = self._add_messages(codec, received, pieces[rank], flats)
        if self._back is not None:
            self._return_encoded(self._back, pieces, totals, flats)
        elif self.owned is None:
            self._return_dense(pieces, totals, flats)

    def _add_messages(
        self, codec: Codec, received: Sequence[Tensor], pieces: Sequence[Piece], flats: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """The sum of each own piece over the ranks, in their order, in the place of this rank's gradient, which was sent."""
        totals = [flats[piece.name][piece.start : piece.stop] for piece in pieces]
        scratch = self._kept("decoded", max((piece.numel for piece in pieces), default=0), torch.float32)
        for sender, message in enumerate(received):
            keys = self._keys(pieces, str(sender))
            for total, (piece, encoded) in zip(totals, unpack_all(codec, message, pieces, keys), strict=True):
                if sender == 0:
                    codec.decode(encoded, piece.numel, total)
                else:
                    total.add_(codec.decode(encoded, piece.numel, scratch[: piece.numel]))
        return totals

    def _return_encoded(
        self, codec: Codec, pieces: Sequence[Sequence[Piece]], totals: Sequence[Tensor], flats: Mapping[str, Tensor]
    ) -> None:
        own = pieces[self.channel.rank]
        before = self._state.get("sum_residual", {})
        after = {
            name: self._next("sum_residual", name) for name in dict.fromkeys(piece.name for piece in own) if before
        }
        counts = [message_bytes(codec, owner) for owner in pieces]
        whole = self._kept("messages", sum(counts), torch.uint8)
        messages = torch.split(whole, counts)
        answer = messages[self.channel.rank]
        keys = self._keys(own, "sum")
        for piece, total, key, slot in zip(own, totals, keys, slots(codec, answer, own), strict=True):
            start = piece.start - self._own_ranges[piece.name][0]
            if before:
                total.add_(before[piece.name][start : start + piece.numel])
            encoded = codec.encode(total, key=key, offset=piece.offset, out=slot)
            if before:
                lost = after[piece.name][start : start + piece.numel]
                torch.sub(total, codec.decode(encoded, piece.numel, lost), out=lost)
        self.channel.all_gather(answer, whole, counts)
        for owner, message in zip(pieces, messages, strict=True):
            for piece, encoded in unpack_all(codec, message, owner, self._keys(owner, "sum")):
                codec.decode(encoded, piece.numel, flats[piece.name][piece.start : piece.stop])

    def _return_dense(
        self, pieces: Sequence[Sequence[Piece]], totals: Sequence[Tensor], flats: Mapping[str, Tensor]
    ) -> None:
        counts = [sum(piece.numel for piece in owner) for owner in pieces]
        whole = self._kept("sums", sum(counts), torch.float32)
        own = torch.split(whole, counts)[self.channel.rank]
        for total, part in zip(totals, torch.split(own, [len(total) for total in totals]), strict=True):
            part.copy_(total)
        self.channel.all_gather(own, whole, counts)
        everything = [piece for owner in pieces for piece in owner]
        for piece, total in zip(everything, torch.split(whole, [piece.numel for piece in everything]), strict=True):
            flats[piece.name][piece.start : piece.stop] = total

    def _kept(self, what: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that stays from sum to sum: pages that are fresh at each cost more than the arithmetic on them."""
        found = self._buffers.get(what)
        if found is None or len(found) < numel:
            found = self._buffers[what] = torch.empty(numel, dtype=dtype, device=self.device)
        return found[:numel]

    def _sum_selected(self, flats: Mapping[str, Tensor]) -> None:
        if self.rule.kind == "dgc":
            ratio = ratio_at(self.step - self.rule.start, self.rule.number, self.config.warmup)
            codec: Codec = TopK(ratio)
            payloads = [self._send_momentum(name, flat, ratio) for name, flat in flats.items()]
        else:
            assert self._codec is not None
            codec = self._codec
            self._compensate_(flats)
            payloads = [codec.encode(flat) for flat in flats.values()]
            if self._has_residual:
                for (name, flat), encoded in zip(flats.items(), payloads, strict=True):
                    # What was sent was sent exactly, so what is left of it is zero.
                    lost = self._next("residual", name).copy_(flat)
                    lost[encoded.payload[1].to(torch.int64)] -= encoded.payload[0]
        counts = [len(payload.payload[0]) for payload in payloads]
        by_rank = [counts] * self.channel.size
        if not codec.has_fixed_size:
            by_rank = self._tell_counts(counts)
        self.sent_counts = [count for counted in by_rank for count in counted]
        sizes = [8 * sum(counted) for counted in by_rank]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.channel.all_gather(pack_all(payloads, self.device), whole, sizes)
        for flat in flats.values():
            flat.zero_()
        for counted, message in zip(by_rank, torch.split(whole, sizes), strict=True):
            start = 0
            for flat, count in zip(flats.values(), counted, strict=True):
                middle, stop = start + 4 * count, start + 8 * count
                places = message[middle:stop].view(torch.int32).to(torch.int64)
                flat.index_add_(0, places, message[start:middle].view(torch.float32))
                start = stop

    def _send_momentum(self, name: str, gradient: Tensor, ratio: float) -> Encoded:
        before = DGCState(self._state["momentum"][name], self._state["unsent"][name])
        encoded, after = send(accumulate(before, gradient, self.config.momentum), ratio)
        self._next("momentum", name).copy_(after.momentum)
        self._next("unsent", name).copy_(after.unsent)
        return encoded

    def _tell_counts(self, counts: list[int]) -> list[list[int]]:
        own = torch.tensor(counts, dtype=torch.int64, device=self.device)
        told = own.new_empty(len(counts) * self.channel.size)
        self.channel.all_gather(own, told, [len(counts)] * self.channel.size)
        found: list[list[int]] = told.view(self.channel.size, -1).tolist()
        return found

    def _sum_random(self, flats: Mapping[str, Tensor]) -> None:
        assert self._codec is not None
        self._compensate_(flats)
        payloads = []
        for name, flat in flats.items():
            key = codec_key(self.seed, self.step, name)
            encoded = self._codec.encode(flat, key=key, offset=self.parts[name].offset)
            if not bool(flat.isfinite().all()):
                # The places that were drawn may all be good ones, and a bad gradient must not arrive as a good one.
                encoded.payload[0].fill_(float("nan"))
            if self._has_residual:
                lost = self._next("residual", name)
                torch.sub(flat, self._codec.decode(encoded, flat.numel()), out=lost)
            payloads.append(encoded)
        packed = torch.cat([encoded.payload[0] for encoded in payloads])
        sum_in_order_(packed, self.channel)
        sizes = [len(encoded.payload[0]) for encoded in payloads]
        for flat, encoded, total in zip(flats.values(), payloads, torch.split(packed, sizes), strict=True):
            flat.copy_(self._codec.decode(replace(encoded, payload=(total,)), flat.numel()))

    def _sum_factors(self, flats: Mapping[str, Tensor]) -> None:
        self._compensate_(flats)
        matrices, rights = {}, self._state["right"]
        for name, flat in flats.items():
            rows, cols, _ = factor_rank(self.parts[name].shape, int(self.rule.number))
            matrices[name] = flat.view(rows, cols)
        lefts = self._sum_packed([multiply_left(matrix, rights[name]) for name, matrix in matrices.items()])
        lefts = [orthogonalise(left) for left in lefts]
        totals = self._sum_packed(
            [multiply_right(matrix, left) for matrix, left in zip(matrices.values(), lefts, strict=True)]
        )
        for (name, matrix), left, total in zip(matrices.items(), lefts, totals, strict=True):
            found = product(left, total)
            if self._has_residual:
                lost = self._next("residual", name).view_as(matrix)
                torch.sub(matrix, found / self.channel.size, out=lost)
            matrix.copy_(found)
            revived = revive_right(total, codec_key(self.seed, self.step, name))
            self._next("right", name).copy_(revived)

    def _sum_packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sum_in_order_(packed, self.channel)
        parts = torch.split(packed, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def dense_buckets(flats: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat tensors that go in one message together, in their order."""
    bucket: list[Tensor] = []
    size = 0
    for flat in flats:
        if bucket and size + len(flat) > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(flat)
        size += len(flat)
    if bucket:
        yield bucket


def _flatten(tensor: Tensor) -> Tensor:
    """The tensor's own memory as flat float32; a copy where it is not contiguous or of another type."""
    return tensor.detach().reshape(-1).to(torch.float32)
