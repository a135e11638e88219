"""Weights that a model reads in float32 though it was told to compute in float64.

Some norms do (``1.0 + self.weight.float()``), so that 16-bit training keeps their precision. In a float64 proof the gradient of
such a weight is a sum in float32, and where a plan splits that sum its rounding is float32's and no bug. Found in the graph of a
loss: a cast on the way from a weight, before anything else than itself has a part in it.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

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
