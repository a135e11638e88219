"""Blocks that are alike are run a few times and then taken as done: a chain of a hundred takes as long as one of five.

Alike is what has the same classes, shapes and settings, is called with the same shapes, and did the same three times in a row. A
block's own number, which some blocks carry, is no setting: what a block does otherwise because of its number alone, and not in
the first three, is not seen.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.costs.links import Done
from shoal.costs.record import Recorder, id_of

NUM_PROOFS = 3
"""Equal runs after which a block is known. The first block of a row may keep what all read, so it is seldom one of them."""
_SETTINGS = (int, float, bool, str, type(None), torch.dtype)


@dataclass
class _Known:
    runs: list[Done] = field(default_factory=list)

    @property
    def is_proved(self) -> bool:
        last = self.runs[-NUM_PROOFS:]
        return len(last) == NUM_PROOFS and all(run == last[0] for run in last)


@contextmanager
def imitating(module: nn.Module, recorder: Recorder, blocks: Sequence[str]) -> Iterator[None]:
    """Inside, blocks that are known do not run: what they did before is written down once more."""
    alike = _Alike(recorder)
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    changed = []
    try:
        for place, path in enumerate(blocks):
            block = module.get_submodule(path)
            weights = [numbers[id(parameter)] for parameter in block.parameters()]
            changed.append((block, block.__dict__.get("forward")))
            block.__dict__["forward"] = partial(
                alike.run, block.forward, signature(block, _place(path, place)), weights
            )
        yield
    finally:
        for block, forward in changed:
            block.__dict__.pop("forward")
            if forward is not None:
                block.__dict__["forward"] = forward


class _Alike:
    """What is known of blocks in one forward pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, _Known] = {}
        self._outputs: dict[Hashable, tuple[list[Tensor], Any]] = {}

    def run(self, forward: Callable[..., Any], look: Hashable, weights: list[int], /, *args: Any, **kwargs: Any) -> Any:
        """A block's forward pass."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in given)
        others = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _SETTINGS))
        key = (look, shapes, others)
        known = self._known.setdefault(key, _Known())
        link = self._recorder.links.now
        if known.is_proved:
            link.done.extend(known.runs[-1])
            link.weights.update({number: self._recorder.names[number] for number in weights})
            return self._imitate(*self._outputs[key], given)
        start = link.done.lengths()
        output = forward(*args, **kwargs)
        known.runs.append(link.done.since(start))
        self._outputs[key] = given, output
        return output

    def _imitate(self, then: list[Tensor], output: Any, given: list[Tensor]) -> Any:
        """A new output of the same shapes; what was handed through is handed through again."""
        passed = {id_of(before): now for before, now in zip(then, given, strict=True)}

        def make(tensor: Tensor) -> Tensor:
            if id_of(tensor) in passed:
                return passed[id_of(tensor)]
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            # A copy, because a leaf that wants a gradient cannot be changed in place.
            return new.requires_grad_().clone() if tensor.requires_grad else new

        with self._recorder.paused():
            return tree_map_only(Tensor, make, output)


def signature(block: nn.Module, place: int) -> Hashable:
    """Everything that is written in a block: equal ones do the same, unless their code asks for something outside."""
    return tuple(
        (
            path,
            type(part),
            _shapes(part._parameters),
            _shapes(part._buffers),
            tuple(
                (name, _setting(value, place)) for name, value in part.__dict__.items() if isinstance(value, _SETTINGS)
            ),
        )
        for path, part in block.named_modules()
    )


def _setting(value: object, place: int) -> object:
    return "place" if type(value) is int and value == place else value


def _shapes(slots: Mapping[str, Tensor | None]) -> Hashable:
    return tuple(
        (name, None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        for name, tensor in slots.items()
    )


def _place(path: str, place: int) -> int:
    """The number of a block in its own row, as its path says it."""
    last = path.rpartition(".")[2]
    return int(last) if last.isdigit() else place
