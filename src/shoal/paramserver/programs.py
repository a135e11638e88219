"""Short programs on named vectors that lie cut over servers, and what their numbers come to. No torch: a center sends them.

L-BFGS over parameter servers (Sandblaster, Dean et al. 2012, section 4.2) moves no vector to its coordinator: it sends each
server a ``Program``, every server runs it on its own slice (``vectors.py``), and only numbers come back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.core.errors import RequestError

WEIGHTS = "weights"
GRADIENT = "gradient"

Kind = Literal["dot", "total", "largest", "has", "copy", "scale", "axpy", "drop"]
MEASURES = ("dot", "total", "largest", "has")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on vectors of all shards; plain fields, so that it can be sent as it is."""

    kind: Kind
    onto: str
    """The vector that is changed or measured."""
    other: str = ""
    """The vector that is read beside it."""
    factor: float = 1.0


def dot(a: str, b: str) -> Operation:
    """Measures the inner product."""
    return Operation(kind="dot", onto=a, other=b)


def total(a: str) -> Operation:
    """Measures the sum of absolute values."""
    return Operation(kind="total", onto=a)


def largest(a: str) -> Operation:
    """Measures the largest absolute value; 0 for a vector without elements."""
    return Operation(kind="largest", onto=a)


def has(a: str) -> Operation:
    """Measures whether there is a vector of this name: 1 or 0."""
    return Operation(kind="has", onto=a)


def copy(a: str, to: str) -> Operation:
    """``to = a``; makes ``to`` where there is none."""
    return Operation(kind="copy", onto=to, other=a)


def scale(a: str, factor: float) -> Operation:
    """``a = factor * a``."""
    return Operation(kind="scale", onto=a, factor=factor)


def axpy(factor: float, x: str, y: str) -> Operation:
    """``y = y + factor * x``."""
    return Operation(kind="axpy", onto=y, other=x, factor=factor)


def drop(a: str) -> Operation:
    """Forgets a vector; one that is not there is forgotten already."""
    return Operation(kind="drop", onto=a)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Operations that are run in order, in one round trip. Its answer has one number for each operation that measures."""

    operations: tuple[Operation, ...]

    @property
    def num_measures(self) -> int:
        """Numbers in the answer."""
        return sum(operation.kind in MEASURES for operation in self.operations)


class Vectors(Protocol):
    """What the coordinator sees: vectors, wherever they lie, and the objective at ``weights``."""

    async def run(self, program: Program) -> tuple[float, ...]:
        """Run a program on every shard; the numbers it measured, over all shards."""
        ...

    async def evaluate(self) -> float:
        """The objective at ``weights``; its gradient is left in ``gradient``."""
        ...


def merge_measures(program: Program, by_shard: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """One answer from the shards' answers; the order of the shards does not matter.

    Raises:
        RequestError: a shard answered with another number of values than the program measures.
    """
    for shard, numbers in enumerate(by_shard):
        if len(numbers) != program.num_measures:
            raise RequestError(
                f"shard {shard} answered {len(numbers)} numbers to a program that measures {program.num_measures}; "
                "do all servers run the same version?"
            )
    measured = [operation.kind for operation in program.operations if operation.kind in MEASURES]
    return tuple(_merge(kind, column) for kind, column in zip(measured, zip(*by_shard, strict=True), strict=True))


def _merge(kind: Kind, numbers: Sequence[float]) -> float:
    if any(math.isnan(number) for number in numbers):
        return math.nan
    if kind == "largest":
        return max(numbers)
    if kind == "has":
        return min(numbers)
    # fsum refuses inf - inf and a sum that overflows; both are "not a number" to a coordinator.
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return math.nan
