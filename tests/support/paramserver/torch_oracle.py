"""What the parameter servers must equal: plain torch on whole tensors, in one process. Imports nothing of ``paramserver``.

``replay`` makes the updates of a log one after the other; ``train_stepwise`` and ``train_alone`` need no log at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

Weights = dict[str, Tensor]
SHAPES = {"embed": (13, 8), "linear.bias": (40,), "linear.weight": (40, 6), "scale": ()}


def initial_weights() -> Weights:
    """The weights that every run begins with."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(unit: int, weights: Weights) -> Weights:
    """The gradient of a work unit: towards a point of its own, and not linear, so that old weights show."""
    generator = torch.Generator().manual_seed(unit)
    pulls = {name: weights[name] - torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: pull / (1.0 + pull.abs()) for name, pull in pulls.items()}


def build_plain(name: str, weights: Weights, lr: float) -> Optimizer:
    """torch's own optimizer over whole tensors."""
    parameters = [weights[key] for key in sorted(weights)]
    match name:
        case "momentum":
            return SGD(parameters, lr=lr, momentum=0.9, fused=True)
        case "adamw":
            return AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)
        case "adagrad":
            return Adagrad(parameters, lr=lr, eps=1e-10, fused=True)
    raise AssertionError(name)


class Plain:
    """Weights and an optimizer in one process."""

    def __init__(self, optimizer: str, rate: Callable[[int], float]) -> None:
        self.weights = initial_weights()
        self.versions: list[Weights] = [_copy(self.weights)]
        self._rate = rate
        self._optimizer = build_plain(optimizer, self.weights, rate(0))

    def step(self, parts: Sequence[tuple[Weights, float]]) -> None:
        """One update from gradients and their factors, added in this order."""
        for name, weight in self.weights.items():
            scaled = [part[name] * factor for part, factor in parts]
            total = scaled[0].clone()
            for one in scaled[1:]:
                total = total + one
            weight.grad = total
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(len(self.versions) - 1)
        self._optimizer.step()
        self.versions.append(_copy(self.weights))


@dataclass(frozen=True)
class Read:
    """One work unit's gradient: of which work unit, and with which version of each parameter's slice it was computed."""

    unit: int
    spans: tuple[tuple[str, int, int, int], ...]
    """Name, first element, end, version."""


def weights_as_read(versions: Sequence[Weights], read: Read) -> Weights:
    """The weights that a worker had in hand."""
    found = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
    for name, start, stop, version in read.spans:
        found[name].view(-1)[start:stop] = versions[version][name].reshape(-1)[start:stop]
    return found


def summed(parts: Sequence[Weights]) -> Weights:
    """Gradients that a worker adds up before it pushes."""
    total = parts[0]
    for part in parts[1:]:
        total = {name: total[name] + part[name] for name in total}
    return total


Log = Sequence[Sequence[tuple[str, int, float]]]
"""Of each round the worker, number and factor of each push."""


def replay(
    log: Log, reads: Mapping[tuple[str, int], Sequence[Read]], optimizer: str, rate: Callable[[int], float]
) -> Plain:
    """Make the updates of a log, computing every gradient anew from what its worker had read."""
    plain = Plain(optimizer, rate)
    for entries in log:
        parts = []
        for worker, number, factor in entries:
            own = [gradient(read.unit, weights_as_read(plain.versions, read)) for read in reads[worker, number]]
            parts.append((summed(own), factor))
        plain.step(parts)
    return plain


def train_stepwise(steps: int, workers: int, optimizer: str, rate: Callable[[int], float]) -> Plain:
    """Synchronous training: every step adds the gradients of its shares in order. What bsp and ssp:0 must equal."""
    plain = Plain(optimizer, rate)
    for step in range(steps):
        plain.step([(gradient(step * workers + share, plain.versions[-1]), 1.0) for share in range(workers)])
    return plain


def train_alone(units: int, optimizer: str, rate: Callable[[int], float]) -> Plain:
    """Plain training, a work unit at a time. What async with one worker must equal."""
    return train_stepwise(units, 1, optimizer, rate)


def _copy(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}
