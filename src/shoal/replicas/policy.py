"""What every replica policy is to the engine, and the list of them.

A policy works on what this rank updates: whole parameters, or the rows that ZeRO or tensor parallelism gave it. Every rule here
is elementwise, so islands exchange between ranks of equal coordinates and the plan inside an island changes no bit. Each
operation rounds once per element: a fused multiply-add would round the last elements of a shard otherwise than those in its
middle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.comm.channel import Channel


@dataclass(frozen=True, kw_only=True)
class Island:
    """One rank's place among the islands, and what it updates."""

    channel: Channel
    """The ranks of equal coordinates, one in each island."""
    weights: Mapping[str, Tensor]
    """What this rank updates, by parameter name in the order of names: live tensors without gradients."""
    seed: int
    """Of the run, for graphs that are drawn."""

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

    def after_update(self, step: int, *, lr: float, is_round: bool) -> bool:
        """The optimizer has stepped; True when the policy changed the weights after it.

        Args:
            step: its number, from 0.
            lr: the rate of the step.
            is_round: a round of the whole model is due.
        """

    def restart(self) -> None:
        """The weights were replaced: by a checkpoint of another policy, or after a phase of plain all-reduce."""

    def loaded(self, *, after_round: bool) -> None:
        """``state`` was written by a checkpoint of this policy, which was saved after a round or between two."""

    def consensus(self) -> dict[str, Tensor]:
        """The weights that stand for all islands, as copies: what is evaluated and saved."""

    def state(self) -> PolicyState:
        """What it remembers."""
