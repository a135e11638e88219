"""The losses that Shoal ships, and accuracy where it makes sense: whole-number targets and one score per choice."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import RequestError
from shoal.models.check import DataShape, load_loss
from shoal.models.config import AnyModelConfig

IGNORED = -100
"""A target that counts for nothing: neither in the loss, nor in its weight, nor in the accuracy."""


Loss = Callable[[Any, Any], Tensor]
"""(output, targets) -> the mean over the microbatch's items. Targets that are a structure, and a batch that is one dict, come as
that."""


class Correct(NamedTuple):
    """Targets that were hit, of those that counted."""

    correct: int
    counted: int


def scores_of(output: Any) -> Tensor:
    """The scores in a model's output: the output itself, or its ``logits`` where it is an object that has them.

    Raises:
        RequestError: there are none.
    """
    found = _find_scores(output)
    if found is None:
        raise RequestError(
            f"the model puts out a {type(output).__name__}, in which no scores are found; put out a tensor or an object whose "
            f"logits are one, or set model.loss to a loss of your own"
        )
    return found


def with_scores(output: Any, scores: Tensor) -> Any:
    """A model's output with other scores in place of its own."""
    if isinstance(output, Tensor):
        return scores
    changed = copy.copy(output)
    changed.logits = scores
    return changed


def count_correct(output: object, targets: Tensor) -> Correct | None:
    """How many targets have the highest score; None where the question makes no sense, as in a regression."""
    found = _find_scores(output)
    if found is None or targets.is_floating_point() or found.ndim != targets.ndim + 1:
        return None
    scores, flat = flatten_scores(found, targets)
    counted = flat != IGNORED
    hits = (scores.argmax(dim=-1) == flat) & counted
    return Correct(correct=int(hits.sum()), counted=int(counted.sum()))


def flatten_scores(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N, choices) and targets (N,), from scores in the last dim, or in dim 1 as torch has them for images.

    Raises:
        RequestError: the output has no score for each target.
    """
    if output.shape[:-1] == targets.shape:
        return output.reshape(-1, output.shape[-1]), targets.reshape(-1)
    if output.ndim > 2 and (output.shape[0], *output.shape[2:]) == tuple(targets.shape):
        return output.movedim(1, -1).reshape(-1, output.shape[1]), targets.reshape(-1)
    raise RequestError(
        f"the model puts out {tuple(output.shape)} and the targets are {tuple(targets.shape)}; "
        f"put out scores of the shape {(*targets.shape, 'choices')}, or set model.loss to a loss of your own"
    )


def build_loss(config: AnyModelConfig, spec: DataShape) -> Loss:
    """The loss: the user's own, mean squared error for a regression, else cross entropy.

    Raises:
        RequestError: the user's own loss cannot be imported.
    """
    own = load_loss(config)
    if own is not None:
        return own
    if spec.kind == "regression":
        return squared_error
    if spec.kind == "own":
        return by_targets if getattr(spec, "has_one_target", True) else loss_of_output
    return cross_entropy


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Mean over the targets that are not ``IGNORED``; zero, not NaN, when all of them are.

    Args:
        output: scores, or an object that holds them as ``logits``.
        targets: the right choices.
    """
    scores, flat = flatten_scores(scores_of(output), targets)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    total = F.cross_entropy(scores, flat, ignore_index=IGNORED, reduction="sum")
    return total / (flat != IGNORED).sum().clamp(min=1)


def squared_error(output: Any, targets: Tensor) -> Tensor:
    """Mean over samples and predicted numbers.

    Raises:
        RequestError: the shapes differ; broadcasting one to the other would give a loss of something else.
    """
    output = scores_of(output)
    if output.shape != targets.shape:
        raise RequestError(
            f"the model puts out {tuple(output.shape)} and the targets are {tuple(targets.shape)}; make the two shapes equal"
        )
    if output.dtype in (torch.bfloat16, torch.float16):
        output = output.float()
    return F.mse_loss(output, targets.to(output.dtype))


def loss_of_output(output: Any, targets: Any) -> Tensor:
    """The loss that the model computed itself: ``output.loss`` or ``output["loss"]``.

    Raises:
        RequestError: there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise RequestError(
            f"no loss is given and the model's output, a {type(output).__name__}, has none; set model.loss (loss=) to a function "
            "of the output and the batch, or give the samples the labels from which the model computes its own"
        )
    return found


def by_targets(output: Any, targets: Any) -> Tensor:
    """Mean squared error for floating-point targets, cross entropy for whole numbers, else the loss of the model's output."""
    if not isinstance(targets, Tensor):
        return loss_of_output(output, targets)
    return squared_error(output, targets) if targets.is_floating_point() else cross_entropy(output, targets)


def _find_scores(output: Any) -> Tensor | None:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None
