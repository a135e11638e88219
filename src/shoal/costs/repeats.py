"""Blocks that are alike are run a few times and then taken as done: a model of a hundred takes as long as one of five.

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

from shoal.costs.tracer import Call, Event, ModuleCall, ModuleReturn, Record, Saved, TensorInfo, Tracer, tensors_in

NUM_PROOFS = 3
"""Equal runs after which a block is known. The first block of a list may keep what all read, so it is seldom one of them."""
_SETTINGS = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """In a record: a block did not run, because it does what another one did."""

    path: str
    of: str
    """The block that did run,"""
    start: int
    end: int
    """and its events in the record."""
    first_storage: int
    """Storages with this number or a higher one were made by it."""
    storages: dict[int, int]
    """Storages of what the other block read and gave back, and those that stand for them here."""


def expand(record: Record) -> Iterator[Event]:
    """The events of a record as if all blocks had run. Storages that a repeated block would have made have negative numbers."""
    fresh = [0]
    for event in record.events:
        yield from _expand_event(record, event, fresh)


def _expand_event(record: Record, event: Event | Repeat, fresh: list[int]) -> Iterator[Event]:
    if not isinstance(event, Repeat):
        yield event
        return
    storages = dict(event.storages)

    def change(tensor: TensorInfo) -> TensorInfo:
        if tensor.storage not in storages:
            if 0 <= tensor.storage < event.first_storage:
                return tensor
            fresh[0] -= 1
            storages[tensor.storage] = fresh[0]
        return tensor.with_storage(storages[tensor.storage])

    for earlier in record.events[event.start : event.end]:
        for inner in _expand_event(record, earlier, fresh):
            yield _changed(inner, change, event)


def _changed(event: Event, change: Callable[[TensorInfo], TensorInfo], repeat: Repeat) -> Event:
    if isinstance(event, Saved):
        return Saved(change(event.tensor))
    path = repeat.path + event.path.removeprefix(repeat.of) if event.path.startswith(repeat.of) else event.path
    if isinstance(event, ModuleReturn):
        return ModuleReturn(path, _map(change, event.output))
    args, kwargs = _map(change, event.args), _map(change, event.kwargs)
    if isinstance(event, ModuleCall):
        return ModuleCall(path, args, kwargs, event.time)
    return Call(event.name, event.func, path, args, kwargs, _map(change, event.output), event.products)


def _map(change: Callable[[TensorInfo], TensorInfo], value: Any) -> Any:
    if isinstance(value, TensorInfo):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(change, item) for item in value)
    return {key: _map(change, item) for key, item in value.items()} if isinstance(value, dict) else value


@contextmanager
def repeating(tracer: Tracer, blocks: Sequence[str]) -> Iterator[None]:
    """Inside, blocks that are known do not run: that they do what another did is put into the record."""
    repeater = _Repeater(tracer)
    changed = []
    try:
        for place, path in enumerate(blocks):
            block = tracer.model.get_submodule(path)
            changed.append((block, block.__dict__.get("forward")))
            look = signature(block, _place(path, place))
            block.__dict__["forward"] = partial(repeater.run, block.forward, path, block, look)
        yield
    finally:
        for block, forward in changed:
            block.__dict__.pop("forward")
            if forward is not None:
                block.__dict__["forward"] = forward


@dataclass
class _Known:
    """The runs of blocks that are alike."""

    forms: list[Hashable] = field(default_factory=list)
    path: str = ""
    """Of the last run: its block, its events, what it was given and what it gave back."""
    events: tuple[int, int] = (0, 0)
    first_storage: int = 0
    given: list[Tensor] = field(default_factory=list)
    output: Any = None

    @property
    def is_proved(self) -> bool:
        last = self.forms[-NUM_PROOFS:]
        return len(last) == NUM_PROOFS and all(form == last[0] for form in last)


class _Repeater:
    """What is known of blocks in one forward pass."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._known: dict[Hashable, _Known] = {}

    def run(
        self, forward: Callable[..., Any], path: str, block: nn.Module, look: Hashable, /, *args: Any, **kwargs: Any
    ) -> Any:
        """A block's forward pass."""
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in given)
        others = tuple(leaf for leaf in leaves if isinstance(leaf, _SETTINGS))
        known = self._known.setdefault((look, shapes, others), _Known())
        if known.is_proved:
            return self._repeat(known, path, block, given)
        events = self._tracer.record.events
        start, first_storage = len(events), self._tracer.num_storages
        output = forward(*args, **kwargs)
        known.forms.append(tuple(map(_form, events[start:])))
        known.path, known.events, known.first_storage = path, (start, len(events)), first_storage
        known.given, known.output = given, output
        return output

    def _repeat(self, known: _Known, path: str, block: nn.Module, given: list[Tensor]) -> Any:
        """A new output of the same shapes; what was handed through is handed through again."""
        storage_of = self._tracer.storage_of
        weights = zip(self._tracer.model.get_submodule(known.path).parameters(), block.parameters(), strict=True)
        pairs = [*zip(known.given, given, strict=True), *weights]
        storages = {storage_of(then): storage_of(now) for then, now in pairs}
        passed = {storage_of(then): now for then, now in zip(known.given, given, strict=True)}

        def make(tensor: Tensor) -> Tensor:
            if storage_of(tensor) in passed:
                return passed[storage_of(tensor)]
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            # A copy, because a leaf that wants a gradient cannot be changed in place.
            new = new.requires_grad_().clone() if tensor.requires_grad else new
            storages[storage_of(tensor)] = storage_of(new)
            return new

        with self._tracer.paused():
            output = tree_map_only(Tensor, make, known.output)
        start, end = known.events
        repeat = Repeat(
            path=path, of=known.path, start=start, end=end, first_storage=known.first_storage, storages=storages
        )
        self._tracer.record.events.append(repeat)
        return output


def _form(event: Event | Repeat) -> Hashable:
    """An event without the tensors that it was about."""
    if isinstance(event, Call):
        tensors = tensors_in((event.args, event.kwargs, event.output))
        return event.name, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    if isinstance(event, Saved):
        return event.tensor.shape, event.tensor.dtype, event.tensor.storage_bytes
    return (event.start, event.end) if isinstance(event, Repeat) else type(event).__name__


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
    """The number of a block among its siblings, as its path says it."""
    last = path.rpartition(".")[2]
    return int(last) if last.isdigit() else place
