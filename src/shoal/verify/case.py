"""What a proof runs, in plain values that cross to other processes as JSON.

The reference process must not import ``parallel/``, and the whole recipe knows that room's section; so what decides the numbers
is cut out of the recipe here, and the reference reads the sections it needs with the schemas of their own rooms.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.optim.config import PrecisionName


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, data, optimizer and the numbers that decide every bit of a run, whatever its plan."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    optim: Mapping[str, Any]
    seed: int
    global_batch: int
    precision: PrecisionName
    batch_norm: str
    total_steps: int
    """Length of the whole run: schedules of the learning rate depend on it."""
    steps: int
    """Steps to run and compare."""

    def as_values(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Case":
        """Back from JSON."""
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The order in which one step's gradients are added: microbatches in order, one partial sum per replica, these in rank
    order."""

    replicas: int
    microbatches: int
    """Per replica and step."""
