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
from shoal.paramserver.lbfgs.batches import InOrder
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


# One shard's part of a gradient that is computed in work units: every work unit added once, in order, whoever sent it.
#
# The worker that a work unit came from, and the order in which results come, differ from run to run; the sum does not, because
# a result waits until those before it have been added. A result of an earlier evaluation, whose weights are no longer the
# current ones, is refused by its number.

_TOTAL = "total"


class GradientSum:
    """The gradient of one shard, while its work units come in. A replica that is offered the same ones ends with the same
    bits."""

    def __init__(self, like: Tensor) -> None:
        """Make room for a flat gradient of this shape and type; ``begin`` says what it is of."""
        self._total = torch.zeros_like(like)
        self._evaluation = -1
        self._coming: InOrder[Tensor] = InOrder(0)

    @property
    def evaluation(self) -> int:
        """The number of the evaluation that results are taken for; -1 before the first."""
        return self._evaluation

    @property
    def is_done(self) -> bool:
        """True when every work unit has been added."""
        return self._coming.is_done

    @property
    def num_kept(self) -> int:
        """Results in memory that wait for an earlier one."""
        return self._coming.num_kept

    def begin(self, evaluation: int, num_units: int) -> None:
        """Begin an evaluation; what came of an earlier one is forgotten. Beginning it once more does nothing.

        Raises:
            RequestError: a later one has begun.
        """
        if evaluation == self._evaluation:
            return
        if evaluation < self._evaluation:
            raise RequestError(f"evaluation {evaluation} cannot begin: {self._evaluation} has begun")
        self._evaluation = evaluation
        self._coming = InOrder(num_units)
        self._total.zero_()

    def add(self, evaluation: int, unit: int, gradient: Tensor) -> bool:
        """Take the gradient of one work unit; False when it is of another evaluation or was there before.

        Args:
            evaluation: which one it was computed for.
            work unit: its place in the batch.
            gradient: flat, summed over the work unit's samples with the weights that they have in the batch; kept, not copied.

        Raises:
            RequestError: it has another shape or type, or there is no such work unit.
        """
        if gradient.shape != self._total.shape or gradient.dtype != self._total.dtype:
            raise RequestError(
                f"work unit {unit} brought a gradient of {gradient.dtype} {tuple(gradient.shape)}, and this shard is "
                f"{self._total.dtype} {tuple(self._total.shape)}"
            )
        if evaluation != self._evaluation or not self._coming.is_wanted(unit):
            return False
        for ready in self._coming.offer(unit, gradient):
            self._total.add_(ready)
        return True

    def export(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """A copy of everything, for a new replica: tensors, the waiting ones by work unit, and values for ``json``."""
        tensors = {_TOTAL: self._total.clone()}
        tensors |= {str(unit): gradient.clone() for unit, gradient in self._coming.kept.items()}
        counts = {"num_units": self._coming.num_units, "num_through": self._coming.num_through}
        return tensors, {"evaluation": self._evaluation, **counts}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Become the replica that ``export`` saw."""
        kept = {int(name): tensor for name, tensor in tensors.items() if name != _TOTAL}
        self._total.copy_(tensors[_TOTAL])
        self._evaluation = values["evaluation"]
        self._coming = InOrder.restore(values["num_units"], values["num_through"], kept)

    @property
    def total(self) -> Tensor:
        """The sum over the whole batch; not a copy."""
        assert self.is_done, f"{self._coming.num_kept} work units are still waiting for an earlier one"
        return self._total
