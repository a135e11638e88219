"""What the units of a chain hold and receive, and what a clock shows between their calls, seen in forward passes.

The clock may be one of seconds (``measure.py``) or a count of work (``estimate.py``).
"""

from collections.abc import Callable, Iterator, Sequence
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
from shoal.costs.undisturbed import undisturbed
from shoal.pipeline.split import UnitCost
from shoal.pipeline.units import Unit

FORWARDS_PER_STEP = 3
"""A forward pass, and a backward pass that takes twice as long: two matrix products for each of the forward's."""


@dataclass
class Watch:
    """What the calls of the units show in one pass after another.

    What runs between two units counts with the first of them, because a stage ends where the next one's first unit is called.
    """

    model: nn.Module
    units: Sequence[Unit]
    clock: Callable[[Sequence[Tensor]], float]
    """Read where units begin, with the tensors that are at hand there."""
    call: int = -1
    depth: int = 0
    """Units that are running; what a unit calls is its own affair."""
    marks: list[float] = field(default_factory=list)
    saved: list[int] = field(init=False)
    """Bytes that each unit keeps for the backward pass; what several keep counts with the first."""
    received: list[int] = field(init=False)
    _seen: dict[int, torch.UntypedStorage] = field(init=False)
    """Storages that are counted already, or never: those of weights and buffers. Held, so that no address is used twice."""

    def __post_init__(self) -> None:
        self.saved, self.received = [0] * len(self.units), [0] * len(self.units)
        held = [tensor.untyped_storage() for tensor in (*self.model.parameters(), *self.model.buffers())]
        self._seen = {storage.data_ptr(): storage for storage in held}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the model is in training, and of what is done to it nothing stays."""
        handles = []
        for path in dict.fromkeys(unit.path for unit in self.units):
            module = self.model.get_submodule(path)
            # Before the unit's other hooks: they are measured with it.
            handles.append(module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with undisturbed(self.model, training=True), torch.enable_grad():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, example: tuple[Tensor, ...]) -> list[float]:
        """What the clock shows for each unit in one pass.

        Raises:
            RequestError: the pass in training does not call the units that were found.
        """
        self.call, self.depth, self.marks = -1, 0, [self.clock(example)]
        output = self.model(*example)
        self.marks.append(self.clock(example))
        # Not before: freeing what the pass saved is no unit's time.
        del output
        if self.call != len(self.units) - 1:
            raise RequestError(_other_way("ends", self.units[self.call + 1].path))
        # From the beginning to the second unit, from there to the third, and so on.
        return [after - before for before, after in pairwise([self.marks[0], *self.marks[2:]])]

    def run_saving(self, example: tuple[Tensor, ...]) -> list[float]:
        """The same, and see what is saved for the backward pass; looking takes time."""
        weights = dict(self._seen)
        try:
            # Nothing is kept: no backward pass follows, and a graph that lives on would remember the shapes of the weights.
            with saved_tensors_hooks(self._save, lambda nothing: nothing):
                return self.run(example)
        finally:
            self._seen = weights

    def costs(self, seconds: Sequence[float]) -> tuple[UnitCost, ...]:
        """What was seen, with the time that each unit takes in a step.

        Weights that several units have count once, with the first; weights of no unit count with the first of all.
        """
        weights = _weight_bytes(self.model, self.units)
        return tuple(
            UnitCost(
                path=unit.path,
                seconds=seconds[call],
                weight_bytes=weights[call],
                activation_bytes=self.saved[call],
                can_start=unit.is_once,
                boundary_bytes=self.received[call],
            )
            for call, unit in enumerate(self.units)
        )

    def _save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = storage
            self.saved[max(self.call, 0)] += storage.nbytes()

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
        self.marks.append(self.clock(tensors))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1


def _other_way(what: str, expected: str) -> str:
    return (
        f"the forward pass in training {what} where it called {expected!r} on the example; "
        "a module that is cut must take the same way for every batch"
    )


def _weight_bytes(model: nn.Module, units: Sequence[Unit]) -> list[int]:
    seen: set[Tensor] = set()
    sizes = []
    for unit in units:
        own = set(model.get_submodule(unit.path).parameters()) - seen
        seen |= own
        sizes.append(sum(parameter.nbytes for parameter in own))
    rest = sum(parameter.nbytes for parameter in model.parameters() if parameter not in seen)
    return [sizes[0] + rest, *sizes[1:]] if sizes else []
