"""What each unit of a chain costs, measured by running the module on an example."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shoal.core.errors import RequestError
from shoal.parallel.find.trace import undisturbed
from shoal.pipeline.split import UnitCost
from shoal.pipeline.units import Unit

NUM_TIMED = 3
FORWARDS_PER_STEP = 3
"""A forward pass, and a backward pass that takes twice as long: two matrix products for each of the forward's."""


def estimate_costs(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> tuple[UnitCost, ...]:
    """Measure the units on an example: forward passes in training mode, of which nothing stays.

    What runs between two units counts with the first of them, because a stage ends where the next one's first unit is called.
    A backward pass is not run: its time is taken as twice the forward's, and what it needs is seen when it is saved. Weights and
    saved tensors that several units have count once, with the first; weights of no unit count with the first of all.

    Raises:
        RequestError: the pass in training does not call the units that were found.
    """
    watch = _Watch(units, _storages([*model.parameters(), *model.buffers()]))
    with undisturbed(model, training=True), torch.enable_grad(), watch.hooked(model):
        # The pass that warms up is the one that looks at what is saved: looking takes time.
        with saved_tensors_hooks(watch.save, lambda tensor: tensor):
            watch.run(model, example)
        timed = [watch.run(model, example) for _ in range(NUM_TIMED)]
    seconds = [FORWARDS_PER_STEP * statistics.median(times) for times in zip(*timed, strict=True)]
    return tuple(
        UnitCost(
            path=unit.path,
            seconds=seconds[call],
            weight_bytes=weight_bytes,
            activation_bytes=watch.saved[call],
            can_start=unit.is_once,
            boundary_bytes=watch.received[call],
        )
        for call, (unit, weight_bytes) in enumerate(zip(units, _weight_bytes(model, units), strict=True))
    )


@dataclass
class _Watch:
    """What the calls of the units show in one pass after another."""

    units: Sequence[Unit]
    seen: set[int]
    """Storages that are counted already, or never: those of weights and buffers."""
    call: int = -1
    depth: int = 0
    """Units that are running; what a unit calls is its own affair."""
    marks: list[float] = field(default_factory=list)
    saved: list[int] = field(init=False)
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.saved, self.received = [0] * len(self.units), [0] * len(self.units)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for path in dict.fromkeys(unit.path for unit in self.units):
            module = model.get_submodule(path)
            # Before the unit's other hooks: they are measured with it.
            handles.append(module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, model: nn.Module, example: tuple[Tensor, ...]) -> list[float]:
        """Seconds of each unit in one pass."""
        self.call, self.depth, self.marks = -1, 0, [_now(example)]
        output = model(*example)
        self.marks.append(_now(example))
        # Not before: freeing what the pass saved is no unit's time.
        del output
        if self.call != len(self.units) - 1:
            raise RequestError(_other_way("ends", self.units[self.call + 1].path))
        # From the beginning to the second unit, from there to the third, and so on.
        return [after - before for before, after in pairwise([self.marks[0], *self.marks[2:]])]

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.saved[max(self.call, 0)] += storage.nbytes()
        return tensor

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self.call += 1
        expected = self.units[self.call].path if self.call < len(self.units) else "nothing more"
        if path != expected:
            raise RequestError(_other_way(f"calls {path!r}", expected))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # What has a gradient comes from units before; the model's inputs and masks made of them are at hand everywhere.
        if self.call > 0:
            self.received[self.call] = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        self.marks.append(_now(tensors))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1


def _other_way(what: str, expected: str) -> str:
    return (
        f"the forward pass in training {what} where it called {expected!r} on the example; "
        "a module that is cut must take the same way for every batch"
    )


def _now(tensors: Sequence[Tensor]) -> float:
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _weight_bytes(model: nn.Module, units: Sequence[Unit]) -> list[int]:
    seen: set[Tensor] = set()
    sizes = []
    for unit in units:
        own = set(model.get_submodule(unit.path).parameters()) - seen
        seen |= own
        sizes.append(sum(parameter.nbytes for parameter in own))
    rest = sum(parameter.nbytes for parameter in model.parameters() if parameter not in seen)
    return [sizes[0] + rest, *sizes[1:]] if sizes else []
