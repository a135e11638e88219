"""Parameters of which one process knows the gradient less well than its arithmetic says: found here, excused by name.

*Narrow* parameters are read in float32 by a model that was told to compute in float64. Some norms do that (``1.0 +
self.weight.float()``), so that 16-bit training keeps their precision. In a float64 proof the gradient of such a weight is a sum
in float32, and where a plan splits that sum its rounding is float32's and no bug. They are found in the graph of a loss: a cast
on the way from a weight, before anything else than the weight has a part in it.

*Zeros* are parameters whose true gradient is zero: in 16-bit arithmetic the gradient that a run computes for them is rounding
alone. The bias before a batch norm is one, because the norm takes it off again. In float32 such a gradient is below the law's
limit of noise by itself. In bfloat16 it is not, and a limit that is as much coarser for every parameter would hide the small
gradients of norms and biases. So the coarser limit holds for these parameters alone, and float64 decides which they are: at the
first weights and at the last, since a gradient may also be zero at the start alone (behind a layer that begins with zeros).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.verify.reference.case import NOISE_EPS
from shoal.verify.reference.model import Ids, ReferenceModel, build_reference, global_batches, norm_of

_CAST = "ToCopyBackward0"
# What may lie between a weight and its cast: nothing that sums over samples or positions.
_SHAPES = ("T", "Transpose", "View", "UnsafeView", "Unsqueeze", "Squeeze", "Permute", "Expand", "Slice", "Alias")
_ARITHMETIC = ("Add", "Sub", "Rsub", "Mul", "Neg", "Exp", "Abs", "Sigmoid", "Softplus")
_BETWEEN = frozenset(f"{name}Backward{number}" for name in (*_SHAPES, *_ARITHMETIC) for number in range(3))


def find_narrow(loss: Tensor, named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of the parameters that were cast to another type before they were used."""
    names = {parameter: name for name, parameter in named}
    found, seen, waiting = set[str](), set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [one for one, _ in node.next_functions if one is not None]
        if node.name() == _CAST and (weight := _weight_below(following)) in names:
            found.add(names[weight])
        waiting += following
    return sorted(found)


def _weight_below(nodes: list[Any]) -> Any:
    """The one parameter that a chain of nodes ends at; None where it is no chain, or something else is on it."""
    while len(nodes) == 1:
        (node,) = nodes
        if node.name() == "torch::autograd::AccumulateGrad":
            return node.variable
        if node.name() not in _BETWEEN:
            return None
        nodes = [one for one, _ in node.next_functions if one is not None]
    return None


_LIMIT = NOISE_EPS * float(torch.finfo(torch.float32).eps)


def find_zeros(
    parts: ReferenceModel, gradients_at: Callable[[ReferenceModel, int, Ids], dict[str, Tensor]]
) -> list[str]:
    """Names of the parameters whose gradient is noise in float64 too; none where float64 cannot be run, or is run anyway.

    Args:
        parts: the model after its last step.
        gradients_at: the gradient of a model at a step, on its samples.
    """
    if parts.precision.compute_dtype is None:
        return []
    batches = list(global_batches(parts))
    try:
        precise = build_reference(replace(parts.case, precision="float64"))
        found = _small(gradients_at(precise, 0, batches[0]))
        precise.model.load_state_dict(parts.model.state_dict())
        return sorted(found & _small(gradients_at(precise, len(batches) - 1, batches[-1])))
    except (
        Exception
    ):  # The user's model may raise anything in a type that it was not written for; then nothing is excused.
        return []


def _small(gradients: dict[str, Tensor]) -> set[str]:
    limit = _LIMIT * norm_of(list(gradients.values()))
    return {name for name, gradient in gradients.items() if float(gradient.double().norm()) <= limit}
