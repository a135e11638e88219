"""A batch in small portions, handed to whoever is free, the last of them twice; each counted once. Pure, no torch.

A batch that is cut into one part per worker takes as long as its slowest worker. Cut into portions that are much smaller, a slow
worker gets fewer of them; and when none is left, the ones that have been out longest are given out again to those who are idle,
and whoever comes first counts (backup tasks: Dean et al., Large Scale Distributed Deep Networks, 2012, section 4.2).

Who computes what, and who comes first, is chance; the sum must not be. So results are added in the order of the portions
(``InOrder``), which gives the bits of one process that goes through them in turn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shoal.core.errors import RequestError

T = TypeVar("T")

PER_WORKER = 8
"""Portions that each worker would get if all were equally fast."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """A stretch of the batch."""

    index: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """How many samples it has."""
        return self.stop - self.start


def cut_batch(num_samples: int, num_workers: int, *, per_worker: int = PER_WORKER) -> tuple[Portion, ...]:
    """Portions of a batch, in order, whose sizes differ by at most one sample.

    The cut depends on the plan's number of workers, and not on how many are alive: it decides the order of the sum.

    Raises:
        RequestError: there is nothing to cut, or nobody to work.
    """
    if num_samples < 1 or num_workers < 1 or per_worker < 1:
        raise RequestError(
            f"a batch of {num_samples} samples for {num_workers} workers with {per_worker} portions each cannot be cut; "
            "each must be at least 1"
        )
    count = min(num_samples, num_workers * per_worker)
    bounds = [num_samples * place // count for place in range(count + 1)]
    return tuple(Portion(index=place, start=bounds[place], stop=bounds[place + 1]) for place in range(count))


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A portion that is to be computed."""

    portion: int
    is_backup: bool
    """Somebody else is computing it already."""


class Handout:
    """Who computes which portion of one evaluation. It is told what happens and by which clock; it waits for nothing itself."""

    def __init__(self, num_portions: int, *, max_copies: int = 2, max_ahead: int | None = None) -> None:
        """Begin with every portion to do.

        Args:
            num_portions: of the batch.
            max_copies: workers that may compute one portion at the same time.
            max_ahead: portions that may be begun beyond the first one that is not done, because their results have to be kept
                until it is; None for any number.

        Raises:
            RequestError: a number is below 1.
        """
        for name, value in (("portions", num_portions), ("copies", max_copies), ("portions ahead", max_ahead or 1)):
            if value < 1:
                raise RequestError(f"{value} {name}: there must be at least 1")
        self._num_portions = num_portions
        self._max_copies = max_copies
        self._max_ahead = math.inf if max_ahead is None else max_ahead
        self._begun: dict[int, dict[str, float]] = {}
        """By portion that is neither done nor untouched: who computes it, since when."""
        self._done: set[int] = set()
        self._first_missing = 0
        self._next = 0
        """No portion from here on was ever handed out."""
        self._returned: set[int] = set()
        """Handed out before, and nobody computes them now."""
        self.num_backups = 0
        """Portions given out a second time."""
        self.num_wasted = 0
        """Results that came after another of the same portion."""

    @property
    def is_done(self) -> bool:
        """True when every portion has been counted."""
        return len(self._done) == self._num_portions

    def take(self, worker: str, now: float) -> Handed | None:
        """The portion that a free worker computes next; None when there is none for it now.

        Args:
            worker: who asks. It may ask for several, and works on all of them.
            now: by any clock that does not go back.
        """
        portion = self._take_untouched()
        is_backup = False
        if portion is None:
            portion, is_backup = self._slowest(worker), True
        if portion is None:
            return None
        self.num_backups += is_backup
        self._begun.setdefault(portion, {})[worker] = now
        return Handed(portion=portion, is_backup=is_backup)

    def finish(self, worker: str, portion: int) -> bool:
        """Take note of a result; True when it is the one that counts.

        A worker that was given up may still bring one; it is as good as any.

        Raises:
            RequestError: there is no such portion, or it was never given to anybody.
        """
        if not 0 <= portion < self._num_portions:
            raise RequestError(f"{worker} computed portion {portion} of a batch of {self._num_portions}")
        if portion >= self._next:
            raise RequestError(f"{worker} computed portion {portion}, which nobody was asked for")
        if portion in self._done:
            self.num_wasted += 1
            return False
        self._begun.pop(portion, None)
        self._returned.discard(portion)
        self._done.add(portion)
        while self._first_missing in self._done:
            self._first_missing += 1
        return True

    def lose(self, worker: str) -> tuple[int, ...]:
        """A worker is gone: what only it computed is to do again. Returns those portions."""
        mine = [portion for portion, workers in self._begun.items() if worker in workers]
        alone = []
        for portion in mine:
            del self._begun[portion][worker]
            if not self._begun[portion]:
                del self._begun[portion]
                alone.append(portion)
        self._returned.update(alone)
        return tuple(sorted(alone))

    def _take_untouched(self) -> int | None:
        if self._returned:
            # The earliest first: results behind it are being kept for its sake.
            portion = min(self._returned)
            self._returned.discard(portion)
            return portion
        if self._next < self._num_portions and self._next - self._first_missing < self._max_ahead:
            self._next += 1
            return self._next - 1
        return None

    def _slowest(self, worker: str) -> int | None:
        """The portion that has been out longest and may be given to this worker too."""
        open_to_it = [
            (min(workers.values()), portion)
            for portion, workers in self._begun.items()
            if worker not in workers and len(workers) < self._max_copies
        ]
        return min(open_to_it)[1] if open_to_it else None


class InOrder(Generic[T]):
    """Results let through in the order of their portions, each once, however they come."""

    def __init__(self, num_portions: int) -> None:
        """Begin with none."""
        self._num_portions = num_portions
        self._next = 0
        self._early: dict[int, T] = {}

    @property
    def is_done(self) -> bool:
        """True when the last one has been let through."""
        return self._next == self._num_portions

    @property
    def num_kept(self) -> int:
        """Results that wait for an earlier one."""
        return len(self._early)

    @property
    def num_portions(self) -> int:
        """Of the batch."""
        return self._num_portions

    @property
    def num_through(self) -> int:
        """Results that were let through."""
        return self._next

    @property
    def kept(self) -> Mapping[int, T]:
        """What waits, by portion."""
        return self._early

    @classmethod
    def restore(cls, num_portions: int, num_through: int, kept: Mapping[int, T]) -> "InOrder[T]":
        """One that is as another was."""
        made: InOrder[T] = cls(num_portions)
        made._next, made._early = num_through, dict(kept)
        return made

    def is_wanted(self, portion: int) -> bool:
        """True for a portion that was not offered before.

        Raises:
            RequestError: there is no such portion.
        """
        if not 0 <= portion < self._num_portions:
            raise RequestError(f"a result of portion {portion} of a batch of {self._num_portions}")
        return portion >= self._next and portion not in self._early

    def offer(self, portion: int, result: T) -> list[T]:
        """Let through what can be added now, in order; nothing for a portion that was offered before.

        Raises:
            RequestError: there is no such portion.
        """
        if self.is_wanted(portion):
            self._early[portion] = result
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


# TODO docstring of the former paramserver.evaluation:
# One shard's part of a gradient that is computed in portions: every portion added once, in order, whoever sent it.
#
# The worker that a portion came from, and the order in which results come, differ from run to run; the sum does not, because a
# result waits until those before it have been added. A result of an earlier evaluation, whose weights are no longer the current
# ones, is refused by its number.

_TOTAL = "total"


class GradientSum:
    """The gradient of one shard, while its portions come in. A replica that is offered the same ones ends with the same bits."""

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
        """True when every portion has been added."""
        return self._coming.is_done

    @property
    def num_kept(self) -> int:
        """Results in memory that wait for an earlier one."""
        return self._coming.num_kept

    def begin(self, evaluation: int, num_portions: int) -> None:
        """Begin an evaluation; what came of an earlier one is forgotten. Beginning it once more does nothing.

        Raises:
            RequestError: a later one has begun.
        """
        if evaluation == self._evaluation:
            return
        if evaluation < self._evaluation:
            raise RequestError(f"evaluation {evaluation} cannot begin: {self._evaluation} has begun")
        self._evaluation = evaluation
        self._coming = InOrder(num_portions)
        self._total.zero_()

    def add(self, evaluation: int, portion: int, gradient: Tensor) -> bool:
        """Take the gradient of one portion; False when it is of another evaluation or was there before.

        Args:
            evaluation: which one it was computed for.
            portion: its place in the batch.
            gradient: flat, summed over the portion's samples with the weights that they have in the batch; kept, not copied.

        Raises:
            RequestError: it has another shape or type, or there is no such portion.
        """
        if gradient.shape != self._total.shape or gradient.dtype != self._total.dtype:
            raise RequestError(
                f"portion {portion} brought a gradient of {gradient.dtype} {tuple(gradient.shape)}, and this shard is "
                f"{self._total.dtype} {tuple(self._total.shape)}"
            )
        if evaluation != self._evaluation or not self._coming.is_wanted(portion):
            return False
        for ready in self._coming.offer(portion, gradient):
            self._total.add_(ready)
        return True

    def export(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """A copy of everything, for a new replica: tensors, the waiting ones by portion, and values for ``json``."""
        tensors = {_TOTAL: self._total.clone()}
        tensors |= {str(portion): gradient.clone() for portion, gradient in self._coming.kept.items()}
        counts = {"num_portions": self._coming.num_portions, "num_through": self._coming.num_through}
        return tensors, {"evaluation": self._evaluation, **counts}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Become the replica that ``export`` saw."""
        kept = {int(name): tensor for name, tensor in tensors.items() if name != _TOTAL}
        self._total.copy_(tensors[_TOTAL])
        self._evaluation = values["evaluation"]
        self._coming = InOrder.restore(values["num_portions"], values["num_through"], kept)

    @property
    def total(self) -> Tensor:
        """The sum over the whole batch; not a copy."""
        assert self.is_done, f"{self._coming.num_kept} portions are still waiting for an earlier one"
        return self._total
