"""Gossip with compressed messages: islands send what changed since they last spoke, and mix what they have heard (CHOCO-SGD).

    q_i = Q(x_i - h_i)                          what island i sends of its weights x; h is what its neighbours know of them
    h_i += q_i;  s_i += sum over j of W[i][j] q_j, in the order of islands
    x_i += g (s_i - h_i)

Koloskova et al. 2019, arXiv 1902.00340, algorithm 2, in the form that keeps the sum s of what the neighbours are known to have
and not each of them: so the graph must stay the same. All islands begin with the same weights, which are h and s then. What is
not compressed by rule goes as it is, by the same formula.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.compression.codec import Codec, Encoded, nbytes, unpack
from shoal.compression.keyed import codec_key
from shoal.compression.layout import aligned
from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import mean_weights
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.graphs import mixing
from shoal.replicas.policy import Island, PolicyState, StepEnd


def coded_bytes(codec: Codec, numel: int) -> int:
    """What so many elements of a parameter take in a message."""
    return aligned(nbytes(codec, numel))


class CompressedGossip:
    """A round of mixing every H steps, on a graph that never changes."""

    is_agreed = False
    """See ``Policy``."""
    left_out: tuple[int, ...] = ()
    """See ``Policy``: a neighbour's message is taken as it is."""

    def __init__(self, island: Island, rule: SyncRule, config: ReplicaConfig) -> None:
        assert rule.graph is not None and island.coding is not None
        self._island, self._rate, self._coding = island, config.gossip_rate, island.coding
        self._matrix = mixing(rule.graph, island.count, 0, seed=island.seed, is_directed=False)
        self._known, self._mixed = island.copy_weights(), island.copy_weights()

    def before_update(self) -> None:
        """See ``Policy``."""

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> bool:
        """See ``Policy``."""
        if not end.is_round:
            return False
        island, own, shares = self._island, self._island.number, self._matrix[self._island.number]
        message = self._encode(end.step)
        # The matrix is symmetric: whom an island hears, it also speaks to.
        received = [torch.empty_like(message) if share else message[:0].clone() for share in shares]
        sent = [message if share and other != own else message[:0] for other, share in enumerate(shares)]
        received[own] = message[:0].clone()
        island.channel.all_to_all(sent, received)
        received[own] = message
        for other, share in enumerate(shares):
            if share:
                for name, change in self._decode(received[other], end.step, other).items():
                    self._mixed[name].add_(change * share)
                    if other == own:
                        self._known[name].add_(change)
        for name, weight in island.weights.items():
            weight.add_((self._mixed[name] - self._known[name]).mul_(self._rate))
        return True

    def message_bytes(self, step: int) -> int:
        """What this island sends to each neighbour in the round after a step."""
        return sum(self._size(name, weight, step) for name, weight in self._island.weights.items())

    def _codec(self, name: str, step: int) -> Codec | None:
        return self._coding.codec if name in self._coding.names and step >= self._coding.start else None

    def _size(self, name: str, weight: Tensor, step: int) -> int:
        codec = self._codec(name, step)
        return weight.nbytes if codec is None else coded_bytes(codec, weight.numel())

    def _key(self, name: str, step: int, island: int) -> int:
        return codec_key(self._island.seed, step, f"{name}/{island}")

    def _encode(self, step: int) -> Tensor:
        parts: list[Tensor] = []
        for name, weight in self._island.weights.items():
            change = (weight - self._known[name]).view(-1)
            codec = self._codec(name, step)
            payload = (
                (change,)
                if codec is None
                else codec.encode(change, key=self._key(name, step, self._island.number)).payload
            )
            own = torch.cat([part.contiguous().view(torch.uint8) for part in payload])
            filling = self._size(name, weight, step) - own.numel()
            parts += [own, own.new_zeros(filling)] if filling else [own]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _decode(self, message: Tensor, step: int, island: int) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        at = 0
        for name, weight in self._island.weights.items():
            size, codec = self._size(name, weight, step), self._codec(name, step)
            part = message[at : at + size].clone()
            at += size
            if codec is None:
                found[name] = part.view(weight.dtype).view_as(weight)
                continue
            held = part[: nbytes(codec, weight.numel())]
            encoded: Encoded = unpack(codec, held, weight.numel(), key=self._key(name, step, island))
            found[name] = codec.decode(encoded, weight.numel()).view_as(weight)
        return found

    @torch.no_grad()
    def restart(self) -> None:
        """See ``Policy``. All islands have the same weights then."""
        for name, weight in self._island.weights.items():
            self._known[name].copy_(weight)
            self._mixed[name].copy_(weight)

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""

    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``: the mean of the islands' weights."""
        return mean_weights(self._island, is_agreed=False)

    def state(self) -> PolicyState:
        """See ``Policy``."""
        return PolicyState(shared={}, own={"known": self._known, "mixed": self._mixed}, own_numbers={})

    def close(self) -> None:
        """See ``Policy``."""
