"""Sparse changes: islands send the largest elements of each chunk, and keep the rest for later (SparseLoCo).

At a round ``e = b e + (f - t)``; c is the largest k of every chunk of e, by magnitude, and of equal ones the first; ``e -= c``;
``f -= mean of c``, in the order of islands; every island goes on from f (Sarfi et al. 2025, arXiv 2508.15706). A chunk is 4096
elements of a parameter, counted from its first: the last one is shorter, and keeps its share. With 2 bits a chunk sends its
largest magnitude s and each value as one of -s, -s/3, s/3, s; what that loses stays in e.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.compression.bits import pack_codes, packed_bytes, unpack_codes
from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import mean_weights
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import LEFT_OUT, tell_shares
from shoal.replicas.policy import Island, PolicyState, StepEnd

CHUNK = 4096
_PLACE_BYTES = 2
_SCALE_BYTES = 4


def chunk_groups(numel: int, keep: float) -> list[tuple[int, int, int]]:
    """The chunks of so many elements: their number, their length and what each of them keeps; whole chunks first."""
    whole, rest = divmod(numel, CHUNK)
    groups = [(whole, CHUNK)] if whole else []
    return [(count, size, max(1, int(keep * size))) for count, size in (*groups, *([(1, rest)] if rest else ()))]


def payload_bytes(sizes: Sequence[int], keep: float, *, bits: int, item_bytes: int) -> int:
    """What an island sends in a round, of parameters with so many elements."""
    total = 0
    for numel in sizes:
        for count, _, kept in chunk_groups(numel, keep):
            total += count * kept * _PLACE_BYTES
            total += count * _SCALE_BYTES + packed_bytes(count * kept, 2) if bits == 2 else count * kept * item_bytes
    return total


def largest_places(rows: Tensor, kept: int) -> Tensor:
    """The places of the largest magnitudes of each row, largest first, and of equal ones the first."""
    if rows.dtype != torch.float32:
        return rows.abs().sort(dim=1, descending=True, stable=True).indices[:, :kept]
    # A float32 without its sign orders like a whole number. With the place behind it no two are equal, of which torch's topk
    # would leave open which it takes; that is several times faster than to sort all.
    places = torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
    keys = (rows.view(torch.int32) & 0x7FFFFFFF).long().mul_(CHUNK).add_(places)
    return keys.topk(kept, dim=1).indices


def encode_largest(flat: Tensor, keep: float, *, bits: int) -> Iterator[Tensor]:
    """What is sent of a flat tensor: places and values of the largest of each chunk, as bytes."""
    at = 0
    for count, size, kept in chunk_groups(flat.numel(), keep):
        rows = flat[at : at + count * size].view(count, size)
        at += count * size
        places = largest_places(rows, kept)
        values = rows.gather(1, places)
        yield _as_bytes(places.to(torch.int16))
        if bits != 2:
            yield _as_bytes(values)
            continue
        scales = values.abs().amax(dim=1, keepdim=True)
        is_large = values.abs() > scales * (2 / 3)
        codes = torch.where(values < 0, torch.where(is_large, 0, 1), torch.where(is_large, 3, 2))
        yield _as_bytes(scales.float())
        yield pack_codes(codes.view(-1).to(torch.uint8), 2)


def decode_largest(payload: Tensor, at: int, like: Tensor, keep: float, *, bits: int) -> tuple[Tensor, int]:
    """One parameter's dense change out of a payload, and where the next one begins."""
    found: list[Tensor] = []

    def take(num_bytes: int, dtype: torch.dtype) -> Tensor:
        nonlocal at
        part = payload[at : at + num_bytes].clone().view(dtype)
        at += num_bytes
        return part

    for count, size, kept in chunk_groups(like.numel(), keep):
        places = take(count * kept * _PLACE_BYTES, torch.int16).view(count, kept).long()
        if bits == 2:
            scales = take(count * _SCALE_BYTES, torch.float32).view(count, 1)
            codes = unpack_codes(take(packed_bytes(count * kept, 2), torch.uint8), 2, count * kept)
            levels = torch.tensor([-1.0, -1 / 3, 1 / 3, 1.0], device=like.device)
            values = (levels[codes.long()].view(count, kept) * scales).to(like.dtype)
        else:
            values = take(count * kept * like.element_size(), like.dtype).view(count, kept)
        rows = torch.zeros(count, size, dtype=like.dtype, device=like.device)
        found.append(rows.scatter_(1, places, values).view(-1))
    return (torch.cat(found) if found else like.new_zeros(0)).view_as(like), at


class SparseAveraging:
    """A round every H steps. It holds parameters whole: a shard would cut its chunks elsewhere."""

    def __init__(self, island: Island, rule: SyncRule, config: ReplicaConfig) -> None:
        self._island, self._keep, self._config = island, rule.keep, config
        self._agreed = island.copy_weights()
        self._unsent = {name: torch.zeros_like(weight) for name, weight in island.weights.items()}
        self.left_out: tuple[int, ...] = ()
        """See ``Policy``."""
        self.is_agreed = True
        """See ``Policy``."""

    def before_update(self) -> None:
        """See ``Policy``."""

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> bool:
        """See ``Policy``."""
        self.is_agreed, self.left_out = end.is_round, ()
        if not end.is_round:
            return False
        island, weights = self._island, self._island.weights
        for name, weight in weights.items():
            self._unsent[name].mul_(self._config.sparse_decay)
            self._unsent[name].add_(self._agreed[name] - weight)
        is_in = island.is_finite(self._unsent.values())
        for unsent in self._unsent.values() if not is_in else ():
            unsent.zero_()
        device = next((weight.device for weight in weights.values()), torch.device("cpu"))
        members = tell_shares(island.channel, 1.0 if is_in else LEFT_OUT, step=end.step, device=device)
        self.left_out = members.left_out
        for name, total in self._exchange().items():
            self._agreed[name].sub_(total.div_(members.count))
            weights[name].copy_(self._agreed[name])
        return True

    def _exchange(self) -> dict[str, Tensor]:
        """What islands send, added up in their order; what this one sends is taken out of what it has not sent."""
        channel = self._island.channel
        keep, bits = self._keep, self._config.sparse_bits
        flats = [unsent.view(-1) for unsent in self._unsent.values()]
        own = torch.cat([part for flat in flats for part in encode_largest(flat, keep, bits=bits)])
        whole = own.new_empty(channel.size * own.numel())
        channel.all_gather(own, whole, [own.numel()] * channel.size)
        totals = {name: torch.zeros_like(unsent) for name, unsent in self._unsent.items()}
        for place, payload in enumerate(torch.split(whole, own.numel())):
            at = 0
            for name, unsent in self._unsent.items():
                sent, at = decode_largest(payload, at, unsent, keep, bits=bits)
                totals[name].add_(sent)
                if place == channel.rank:
                    unsent.sub_(sent)
        return totals

    @torch.no_grad()
    def restart(self) -> None:
        """See ``Policy``."""
        for name, weight in self._island.weights.items():
            self._agreed[name].copy_(weight)
            self._unsent[name].zero_()
        self.is_agreed = True

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""
        self.is_agreed = after_round

    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``. Between rounds that is the mean of the islands' weights."""
        return mean_weights(self._island, is_agreed=self.is_agreed)

    def state(self) -> PolicyState:
        """See ``Policy``."""
        return PolicyState(shared={"agreed": self._agreed}, own={"unsent": self._unsent}, own_numbers={})

    def close(self) -> None:
        """See ``Policy``."""


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
