"""The user's own step in place of a loss, and the metrics that it gives beside the loss.

    def loss_fn(model, batch):
        logits = model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        return {"loss": loss, "accuracy": (logits.argmax(-1) == batch["y"]).float().mean()}

A metric is the mean over a microbatch's items, as the loss is. Its value over the global batch is the mean over all microbatches
of all replicas, each weighted by its items, in float64: the same number under every plan that cuts the batch otherwise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan

_MOST_BYTES = 4096
"""Of the names of metrics."""


@dataclass(frozen=True)
class StepFunction:
    """``function(model, batch)`` gives the mean loss of a batch, or a dict with ``loss`` and metrics.

    ``batch`` has the form of the dataset's items, or the one that ``collate_fn`` gives it.
    """

    function: Callable[[nn.Module, Any], Tensor | Mapping[str, Any]]

    def read(self, found: Any) -> tuple[Any, dict[str, float]]:
        """The loss and the metrics of what the function returned.

        Raises:
            RunError: a dict without a loss, or a metric that is no number.
        """
        if not isinstance(found, Mapping):
            return found, {}
        if "loss" not in found:
            keys = ", ".join(repr(key) for key in found) or "nothing"
            raise RunError(f"the step returned a dict of {keys}; it must have the key 'loss'")
        metrics = {}
        for name, value in found.items():
            if name == "loss":
                continue
            if isinstance(value, Tensor) and value.numel() == 1:
                metrics[str(name)] = float(value.detach())
            elif isinstance(value, bool | int | float):
                metrics[str(name)] = float(value)
            else:
                shown = (
                    f"of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                )
                raise RunError(
                    f"the step's metric {str(name)!r} is {shown}; return one number, the mean over the batch's items"
                )
        return found["loss"], metrics


def refuse_step(plan: Plan) -> None:
    """Refuse a plan that runs no whole forward passes.

    Raises:
        RequestError: says why, and which plan can.
    """
    reasons = []
    if plan.pp > 1:
        reasons.append(
            f"pp={plan.pp} runs the forward pass in pieces on several ranks, and none could run a step of your own as a whole; "
            "give loss=function(output, batch) instead"
        )
    if plan.cp > 1:
        reasons.append(
            f"cp={plan.cp} gives every rank a part of the sequence, and a step of your own would see that part only; give "
            "loss=function(output, batch) instead"
        )
    if reasons:
        nearest = replace(
            plan, pp=1, cp=1, schedule=None, chunks=None, cp_kind="ring", dp=(plan.dp or 1) * plan.pp * plan.cp
        )
        raise RequestError(
            "\n".join(f"plan {str(plan)!r}: {reason}, or use the plan {str(nearest)!r}" for reason in reasons)
        )


def refuse_own_loss(plan: Plan) -> None:
    """Refuse to cut a sequence of which the model itself computes the loss.

    Raises:
        RequestError: says why, and which plan can.
    """
    nearest = replace(plan, cp=1, cp_kind="ring", dp=(plan.dp or 1) * plan.cp)
    raise RequestError(
        f"plan {str(plan)!r}: cp={plan.cp} gives every rank a part of the sequence, and the model computes its loss from whole "
        f"labels; give a loss of the output and the batch (model.loss, loss=), or use the plan {str(nearest)!r}"
    )


class StepMetrics:
    """Sums of what microbatches of one step gave, and their means over the global batch."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._names: tuple[str, ...] | None = None
        """What all replicas give; None before the first step."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self._sums, self._weight = {}, 0.0

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Note what a microbatch gave.

        Raises:
            RunError: it gave other metrics than the one before.
        """
        if self._weight and set(values) != set(self._sums):
            raise RunError(_differ(tuple(sorted(self._sums)), tuple(sorted(values))))
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * weight
        self._weight += weight

    def reduce(self, mesh: Mesh, device: torch.device) -> dict[str, float]:
        """The means over the global batch. All ranks call it together.

        Raises:
            RunError: replicas gave different metrics.
        """
        own = tuple(sorted(self._sums))
        if self._names is None:
            self._names = _agree(own, mesh, device)
        if not self._names:
            if own:
                raise RunError(_differ(self._names, own))
            return {}
        # A replica without samples in this step has nothing to add.
        is_other = self._weight > 0 and own != self._names
        numbers = [self._sums.get(name, 0.0) for name in self._names] + [self._weight, float(is_other)]
        *sums, weight, others = _sum(torch.tensor(numbers, dtype=torch.float64, device=device), mesh).tolist()
        if others:
            raise RunError(_differ(self._names, own))
        return {name: value / max(weight, 1.0) for name, value in zip(self._names, sums, strict=True)}


def _sum(numbers: Tensor, mesh: Mesh) -> Tensor:
    return mesh.channel(Axis.DATA).all_reduce_(numbers) if mesh.has(Axis.DATA) else numbers


def _agree(own: tuple[str, ...], mesh: Mesh, device: torch.device) -> tuple[str, ...]:
    """The names that the replicas with samples give; those of a replica without any may be missing."""
    if not mesh.has(Axis.DATA):
        return own
    text = "\n".join(own).encode()
    if len(text) > _MOST_BYTES:
        raise RunError(f"the names of the step's metrics are {len(text)} bytes long; {_MOST_BYTES} is the most")
    degree, place = mesh.degree(Axis.DATA), mesh.coordinate(Axis.DATA)
    board = torch.zeros((degree, _MOST_BYTES), dtype=torch.float64, device=device)
    board[place, : len(text)] = torch.tensor(list(text), dtype=torch.float64, device=device)
    rows = _sum(board, mesh).to(torch.uint8).cpu()
    said = [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]
    return tuple(next((row for row in said if row), "").split("\n")) if any(said) else ()


def _differ(names: tuple[str, ...], own: tuple[str, ...]) -> str:
    return (
        f"the step gave the metrics {', '.join(own) or 'none'} for a microbatch and {', '.join(names) or 'none'} for another; "
        "return the same keys every time"
    )
