"""One shard's part of a gradient that is computed in portions: every portion added once, in order, whoever sent it.

The worker that a portion came from, and the order in which results come, differ from run to run; the sum does not, because a
result waits until those before it have been added. A result of an earlier evaluation, whose weights are no longer the current
ones, is refused by its number.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.core.errors import RequestError
from shoal.paramserver.handout import InOrder

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
