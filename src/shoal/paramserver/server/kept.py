"""What workers have not sent yet, as far as the servers of a shard know it: for checkpoints, and for a run that goes on.

A worker sends its residual with the push of a step after which a checkpoint is due. It waits beside the gradient, becomes current
with the update that holds the push, and is current for that one version only: a step later it would be an old one.

What a checkpoint has is handed out to the workers that ask for it, by their place among the workers, until an update holds a push
of the worker that got it: from then on it is in the weights and in that worker's memory.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.paramserver.records import PushId, Update

_WAITING, _CURRENT, _BEGUN = "kept/waiting", "kept/current", "kept/begun"


class KeptResiduals:
    """Residuals of one shard by worker, flat: the compressed slices in the shard's order. Not for two threads at once.

    Args:
        numel: elements of each.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._waiting: dict[PushId, tuple[int, Tensor]] = {}
        self._current: dict[int, Tensor] = {}
        self._begun: dict[int, Tensor] = {}
        self._takers: dict[str, int] = {}

    def begin(self, residuals: Mapping[int, Tensor]) -> None:
        """The run goes on from a checkpoint that has these, by the worker's place."""
        self._waiting, self._current, self._takers = {}, {}, {}
        self._begun = dict(residuals)

    def store(self, identity: PushId, index: int, residual: Tensor) -> None:
        """A worker's residual came with a push."""
        self._waiting[identity] = (index, residual.clone())

    def apply(self, made: Update) -> None:
        """An update was made: what came with its pushes is current, and what was is not any more."""
        self._current = {}
        for entry in made.entries:
            taken = self._takers.pop(entry.worker, None)
            if taken is not None:
                self._begun.pop(taken, None)
            found = self._waiting.pop(entry.identity, None)
            if found is not None:
                self._current[found[0]] = found[1]
        for identity in made.dropped:
            self._waiting.pop(identity, None)

    def discard(self, worker: str, keep: Collection[int]) -> None:
        """A worker has left: what came with pushes that it never committed is nobody's."""
        gone = [one for one in self._waiting if one.worker == worker and one.number not in keep]
        for identity in gone:
            del self._waiting[identity]

    def hand_out(self, worker: str, index: int) -> Tensor | None:
        """What the checkpoint has for the worker at this place; None where it has nothing, or somebody has used it."""
        found = self._begun.get(index)
        if found is not None:
            self._takers[worker] = index
        return found

    def current(self) -> dict[int, Tensor]:
        """By the worker's place, what was not sent before the present version of the weights."""
        return {**self._begun, **self._current}

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything, for another replica of the shard; see ``ShardState.export``."""
        # Copies, each made at once: pushes are stored while another thread does this.
        waiting = dict(self._waiting)
        tensors = {f"{_WAITING}/{place}": one[1] for place, one in enumerate(waiting.values())}
        for prefix, found in ((_CURRENT, self._current), (_BEGUN, self._begun)):
            tensors |= {f"{prefix}/{index}": one.clone() for index, one in found.items()}
        values = {
            "waiting": [[*identity, index] for identity, (index, _) in waiting.items()],
            "current": list(self._current),
            "begun": list(self._begun),
            "takers": dict(self._takers),
        }
        return tensors, values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Become those that ``export`` saw."""
        self._waiting = {
            PushId(worker, number): (index, tensors[f"{_WAITING}/{place}"].clone())
            for place, (worker, number, index) in enumerate(values["waiting"])
        }
        self._current = {index: tensors[f"{_CURRENT}/{index}"].clone() for index in values["current"]}
        self._begun = {index: tensors[f"{_BEGUN}/{index}"].clone() for index in values["begun"]}
        self._takers = dict(values["takers"])


def share_out(saved: Mapping[int, Tensor], *, saved_workers: int, workers: int) -> dict[int, Tensor]:
    """The residuals of a checkpoint for so many workers: each its own, or, of another number of workers, the first their sum.

    Only the sum matters to what is learned, so nothing of it is lost or counted twice.
    """
    if saved_workers == workers:
        return dict(saved)
    total: Tensor | None = None
    for index in sorted(saved):
        total = saved[index].clone() if total is None else total.add_(saved[index])
    return {} if total is None else {0: torch.as_tensor(total)}
