"""One server's slice of named vectors, on which it runs the programs of a coordinator (``programs.py``).

Replicas of a slice agree to the bit: an operation changes elements one by one, and a sum is taken row by row in float64, so it
does not depend on the number of threads. A program has a number; the one that was run last is answered again from memory, so a
message that comes twice does not move the weights twice.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.core.errors import RequestError, did_you_mean
from shoal.paramserver.programs import WEIGHTS, Operation, Program

_READS_OTHER = ("dot", "copy", "axpy")

# A sum is taken over rows of this many elements, in blocks of this many rows (8 MiB of float64).
_ROW = 4096
_BLOCK_ROWS = 256


class ShardVectors:
    """One server's slice of every vector. All of them have the shape and type of its weights."""

    def __init__(self, weights: Tensor) -> None:
        """Begin with the live weights, which programs change in their place."""
        assert weights.ndim == 1, f"a shard is flat, not {tuple(weights.shape)}"
        self._vectors: dict[str, Tensor] = {WEIGHTS: weights.detach()}
        self._number = -1
        self._answer: tuple[float, ...] = ()

    @property
    def number(self) -> int:
        """Of the program that was run last; -1 before the first."""
        return self._number

    @property
    def answer(self) -> tuple[float, ...]:
        """What that program measured."""
        return self._answer

    @property
    def names(self) -> frozenset[str]:
        """The vectors there are."""
        return frozenset(self._vectors)

    def __getitem__(self, name: str) -> Tensor:
        return self._vectors[name]

    @torch.no_grad()
    def put(self, name: str, values: Tensor) -> None:
        """Give a vector these values.

        Raises:
            RequestError: they have another shape or type than the shard.
        """
        weights = self._vectors[WEIGHTS]
        if values.shape != weights.shape or values.dtype != weights.dtype:
            raise RequestError(
                f"vector {name!r} of {values.dtype} {tuple(values.shape)} is not of this shard, which is {weights.dtype} "
                f"{tuple(weights.shape)}"
            )
        self._target(name).copy_(values)

    def move_weights(self, weights: Tensor) -> None:
        """The live weights are elsewhere now, with the values that they had."""
        self._vectors[WEIGHTS] = weights.detach()

    @torch.no_grad()
    def run(self, number: int, program: Program) -> tuple[float, ...]:
        """Run a program; or answer the one that was run last once more.

        Args:
            number: counts the programs of a run from 0, without gaps.
            program: what to do; nothing of it is done when any of it is refused.

        Raises:
            RequestError: the number is out of turn, or the program reads a vector that is not there.
        """
        if number == self._number:
            return self._answer
        self.check_turn(number)
        self._check(program)
        self._answer = tuple(measure for operation in program.operations for measure in self._execute(operation))
        self._number = number
        return self._answer

    def check_turn(self, number: int) -> None:
        """Refuse a program that is not the next one.

        Raises:
            RequestError: it is not.
        """
        if number != self._number + 1:
            raise RequestError(
                f"program {number} is out of turn: this shard has run {self._number} and takes {self._number + 1} next"
            )

    def expect(self, number: int) -> None:
        """Let the next program have this number: a new coordinator does not know how far the last one had counted."""
        self._number, self._answer = number - 1, ()

    def snapshot(self) -> tuple[int, tuple[float, ...], dict[str, Tensor]]:
        """What a new replica needs: the number and the answer of the last program, and copies of all vectors."""
        return self._number, self._answer, {name: vector.clone() for name, vector in self._vectors.items()}

    def restore(self, number: int, answer: Sequence[float], vectors: Mapping[str, Tensor]) -> None:
        """Become the replica that a snapshot was taken of."""
        for name in self.names - vectors.keys() - {WEIGHTS}:
            del self._vectors[name]
        for name, vector in vectors.items():
            self.put(name, vector)
        self._number, self._answer = number, tuple(answer)

    def _check(self, program: Program) -> None:
        names = set(self._vectors)
        for place, operation in enumerate(program.operations):
            reads = [operation.other] if operation.kind in _READS_OTHER else []
            if operation.kind not in ("copy", "has", "drop"):
                reads.append(operation.onto)
            for name in reads:
                if name not in names:
                    raise RequestError(
                        f"operation {place} ({operation.kind}) reads a vector {name!r} that is not there; "
                        f"{did_you_mean(name, names)}"
                    )
            if not math.isfinite(operation.factor):
                raise RequestError(f"operation {place} ({operation.kind} {operation.onto!r}) by {operation.factor}")
            if operation.kind == "copy":
                names.add(operation.onto)
            elif operation.kind == "drop":
                if operation.onto == WEIGHTS:
                    raise RequestError(f"operation {place} would drop the weights")
                names.discard(operation.onto)

    def _execute(self, operation: Operation) -> tuple[float, ...]:
        """The number it measures, if it measures one."""
        onto, other = operation.onto, operation.other
        match operation.kind:
            case "dot":
                return (sum_rows(self._vectors[onto], self._vectors[other]),)
            case "total":
                return (sum_rows(self._vectors[onto]),)
            case "largest":
                vector = self._vectors[onto]
                return (float(vector.abs().max()) if vector.numel() else 0.0,)
            case "has":
                return (float(onto in self._vectors),)
            case "copy":
                self._target(onto).copy_(self._vectors[other])
            case "scale":
                self._vectors[onto].mul_(operation.factor)
            case "axpy":
                self._vectors[onto].add_(self._vectors[other], alpha=operation.factor)
            case "drop":
                self._vectors.pop(onto, None)
        return ()

    def _target(self, name: str) -> Tensor:
        if name not in self._vectors:
            self._vectors[name] = torch.empty_like(self._vectors[WEIGHTS])
        return self._vectors[name]


def sum_rows(a: Tensor, b: Tensor | None = None) -> float:
    """The float64 sum of products of two flat tensors, or of the absolute values of one; the same with any number of threads."""
    sums: list[float] = []
    block = _ROW * _BLOCK_ROWS
    for start in range(0, a.numel(), block):
        part = a[start : start + block].to(torch.float64)
        products = part.abs() if b is None else part * b[start : start + block].to(torch.float64)
        whole = products.numel() // _ROW * _ROW
        if whole:
            sums += _sum_each(products[:whole].view(-1, _ROW))
        if whole < products.numel():
            sums += _sum_each(products[whole:].view(1, -1))
    try:
        return math.fsum(sums)
    except (OverflowError, ValueError):
        return math.nan


def _sum_each(rows: Tensor) -> list[float]:
    # torch splits a sum that has a single result over its threads, which would change its last bits.
    found: list[float] = (rows.expand(2, -1).sum(dim=1)[:1] if rows.shape[0] == 1 else rows.sum(dim=1)).tolist()
    return found
