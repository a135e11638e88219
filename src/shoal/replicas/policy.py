"""What every replica policy is to the engine, and the list of them.

A policy works on what this rank updates: whole parameters, or the rows that ZeRO or tensor parallelism gave it. Every rule here
is elementwise, so islands exchange between ranks of equal coordinates and the plan inside an island changes no bit. Each
operation rounds once per element: a fused multiply-add would round the last elements of a shard otherwise than those in its
middle.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.compression.codec import Codec
from shoal.compression.exchange import CompressedSum
from shoal.replicas.shards import WholeBlocks


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How messages of gossip are coded."""

    codec: Codec
    names: frozenset[str]
    """Of the parameters that are; small ones and vectors are not."""
    start: int
    """The first step whose round is."""


@dataclass(frozen=True, kw_only=True)
class Island:
    """One rank's place among the islands, and what it updates."""

    channel: Channel
    """The ranks of equal coordinates, one in each island."""
    weights: Mapping[str, Tensor]
    """What this rank updates, by parameter name in the order of names: live tensors without gradients."""
    seed: int
    """Of the run, for graphs that are drawn."""
    inside: Channel | None = None
    """The ranks of this island; None where it is one rank."""
    background: Channel | None = None
    """The ranks of ``channel`` once more, for exchanges that go on during steps; None where the rule has none."""
    sums: CompressedSum | None = None
    """Adds changes up compressed, over ``background`` where there is one; None where they go as they are."""
    shards: WholeBlocks | None = None
    """Makes whole blocks of changes that ZeRO has cut; None where the rank holds parameters whole, or nothing is compressed."""
    coding: Coding | None = None
    """How messages to neighbours are coded; None where they go as they are."""
    rank: int = 0
    """Of this process in the run, for errors."""
    deadline_seconds: float = 600.0
    """That a message may take."""

    @property
    def number(self) -> int:
        """Of this island, from 0."""
        return self.channel.rank

    @property
    def count(self) -> int:
        """Of all islands."""
        return self.channel.size

    def copy_weights(self) -> dict[str, Tensor]:
        """The weights as they are now."""
        return {name: weight.clone() for name, weight in self.weights.items()}

    def widen(self, changes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Changes as they go to the other islands. All ranks of an island call it together, on the thread that trains."""
        return changes if self.shards is None else self.shards.widen(changes)

    def narrow_(self, sent: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        """Put what came back for widened changes into the changes."""
        if self.shards is not None:
            self.shards.narrow_(sent, changes)

    def is_finite(self, tensors: Iterable[Tensor]) -> bool:
        """True where these tensors are finite on all ranks of this island, each of which may have a part of them."""
        # The smallest and the largest are not finite where any is not: one pass, and no tensor of flags.
        ends = [torch.stack(torch.aminmax(tensor)) for tensor in tensors if tensor.numel()]
        bad = bool(ends) and not bool(torch.isfinite(torch.stack([end.float() for end in ends])).all())
        if self.inside is not None and self.inside.size > 1:
            device = next((weight.device for weight in self.weights.values()), None)
            bad = bool(self.inside.all_reduce_max_(torch.tensor([float(bad)], device=device)).item())
        return not bad


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """What a policy is told after an optimizer's step."""

    step: int
    """Its number, from 0."""
    lr: float
    """Its rate."""
    is_round: bool
    """A round is due: of the whole model, or of ``stream`` when a fragment is applied."""
    samples: int = 0
    """That this island has learnt from in it."""


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What a policy remembers, by name and then by parameter: live tensors, to be saved and written to."""

    shared: Mapping[str, Mapping[str, Tensor]]
    """The same in every island."""
    own: Mapping[str, Mapping[str, Tensor]]
    """Different in each."""
    own_numbers: Mapping[str, Tensor]
    """Different in each, and of no parameter."""


class Policy(Protocol):
    """Brings islands together. Every method is called by all ranks at the same step."""

    @property
    def is_agreed(self) -> bool:
        """All islands hold the same weights now."""

    def before_update(self) -> None:
        """The optimizer is about to step."""

    @property
    def left_out(self) -> tuple[int, ...]:
        """Islands whose part in the round that was just held was dropped, because it was not finite."""

    def after_update(self, end: StepEnd) -> bool:
        """The optimizer has stepped; True when the policy changed the weights after it."""

    def restart(self) -> None:
        """The weights were replaced: by a checkpoint of another policy, or after a phase of plain all-reduce."""

    def loaded(self, *, after_round: bool) -> None:
        """``state`` was written by a checkpoint of this policy, which was saved after a round or between two."""

    def consensus(self) -> dict[str, Tensor]:
        """The weights that stand for all islands, as copies: what is evaluated and saved."""

    def state(self) -> PolicyState:
        """What it remembers; an exchange that is under way is waited for."""

    def close(self) -> None:
        """Wait for an exchange that is under way: nobody may leave while others still hear him."""
