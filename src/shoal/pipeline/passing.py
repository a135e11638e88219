"""One stage's way through a module: where it stands, how it is left, and what on it has a value."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Received = Sequence[Tensor]
"""What the stage before gave."""


class Left(BaseException):
    """The pass has come to its end here. Not an ``Exception``: a module's own ``except Exception`` must not catch it."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


@dataclass(frozen=True)
class Gone:
    """What a module puts out whose pass was left: the flat arguments of the unit at which it was."""

    arguments: list[Any]


@dataclass
class Pass:
    """One forward pass of one stage."""

    stage: int
    received: Received | None
    """None while it is being found out what must be received."""
    call: int = 0
    is_inside: bool = False
    """A unit is running: what it calls is its own affair."""
    stood_in: list[Tensor] = field(default_factory=list)
    swapped: list[tuple[Any, Tensor]] = field(default_factory=list)
    """Arguments of the stage's first unit, and what was received in their place: later units may be given the same ones."""


def has_no_value(value: Any, stood_in: Sequence[Tensor]) -> bool:
    """True for what depends on a stand-in: it is one, or NaN has come through to it."""
    if not isinstance(value, Tensor):
        return False
    return any(value is tensor for tensor in stood_in) or (value.is_floating_point() and bool(value.isnan().any()))


def are_same(one: Any, other: Any) -> bool:
    """True when two results have equal tensors in equal places."""
    first, second = tree_leaves(one), tree_leaves(other)
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
