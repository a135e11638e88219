"""Iterable datasets: read from the front, in the one order that they have, to an exact position.

One rule for every plan: each replica goes through the whole stream and keeps the samples of its part of each global batch, so
sample i of an epoch is the same sample on any number of replicas, and a batch is what one process would read. Reading is
repeated by the replicas; making batches is not. All of them are at the same place of the stream after a step, so what the
dataset says of itself (``state_dict``) is one value for all, and a run goes on under another number of replicas exactly where
it was.

A dataset (or its iterator) with ``state_dict`` and ``load_state_dict`` goes on at once; one without is read from the beginning
of the epoch again, and what was trained on is dropped. Either way no sample is repeated and none is lost, as long as the
dataset gives the same samples when it is iterated again: ``set_epoch(epoch)`` is called before each epoch where there is one,
and what it draws from the global generators is drawn by the seed and the epoch.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from shoal.core.errors import RequestError, RunError
from shoal.core.functions import call_own
from shoal.core.seeding import derive_key
from shoal.data.order import Position
from shoal.data.streams.statevalues import decode_state, encode_state
from shoal.telemetry.memory import is_out_of_memory
from shoal.telemetry.rngstate import keeping_draws, random_states, seeded

T = TypeVar("T")

_LOOKED_AT = 3
"""Samples after which a copy of a dataset is asked to go on."""
_SKIPPED_AT_ONCE = 4096


def has_state(thing: Any) -> bool:
    """True for what can say where it is, and be set there."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def known_length(dataset: Any) -> int | None:
    """Samples of an epoch of an iterable dataset; None where it does not say."""
    try:
        return len(dataset)
    except TypeError:
        return None


class StreamReader:
    """The place of one process in an iterable dataset.

    Args:
        dataset: iterable; this reader is the only one that moves it.
        seed: of the run; what the dataset draws from the global generators is drawn by it.
        position: where to begin.
        uses_state: what the dataset says of itself is believed; else it is read from the beginning of the epoch.

    Raises:
        RequestError: the stream ends before the position: it is not the one that the position was of.
    """

    def __init__(self, dataset: Any, *, seed: int, position: Position, uses_state: bool = True) -> None:
        self._dataset = dataset
        self._seed = seed
        self._uses_state = uses_state
        self._named = f"the iterable dataset {type(dataset).__name__}"
        self._is_over = False
        self.draws_random_numbers: bool | None = None
        """Reading moves the global generators, whose states are then this reader's own; None before the first sample."""
        self._start(position)

    @property
    def position(self) -> Position:
        """After what was read last; the beginning of the next epoch once this one was read to its end."""
        if self._is_over:
            return Position(epoch=self.epoch + 1)
        return Position(epoch=self.epoch, offset=self.offset, stream=self._state())

    def read(self, count: int) -> list[Any]:
        """The next samples; fewer, down to none, where the epoch ends."""
        if self._is_over:
            return []
        with self._drawing():
            found = self._own(lambda: list(itertools.islice(self._iterator, count)))
        self.offset += len(found)
        self._is_over = len(found) < count
        return found

    def begin_next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._start(Position(epoch=self.epoch + 1))

    def _start(self, position: Position) -> None:
        self._is_over = False
        self.epoch, self.offset = position.epoch, 0
        self._states: Any = None
        dataset = self._dataset
        if hasattr(dataset, "set_epoch"):
            self._own(lambda: dataset.set_epoch(self.epoch))
        saved = _saved_state(position.stream) if position.stream and self._uses_state else None
        if saved is not None and saved["of"] == "dataset":
            self._own(lambda: dataset.load_state_dict(saved["state"]))
        # An __iter__ that is no generator shuffles here, and not when the first sample is read.
        with self._drawing(is_reading=False):
            self._iterator: Any = self._own(lambda: iter(dataset))
        if saved is not None and saved["of"] == "iterator":
            self._own(lambda: self._iterator.load_state_dict(saved["state"]))
        if saved is not None:
            self.offset = position.offset
            self._states = saved["draws"]
            if self._states is not None:
                self.draws_random_numbers = True
            return
        while self.offset < position.offset:
            if not self.read(min(_SKIPPED_AT_ONCE, position.offset - self.offset)):
                raise RequestError(
                    f"{self._named} ended after {self.offset} samples of epoch {self.epoch} and the data position is sample "
                    f"{position.offset}; it is not the data that the checkpoint was made with"
                )

    def _state(self) -> str:
        """What the iterator or the dataset says of itself, as JSON; empty where neither says anything."""
        if self.offset == 0 or not self._uses_state:
            return ""
        for of, thing in (("iterator", self._iterator), ("dataset", self._dataset)):
            if has_state(thing):
                state = self._own(thing.state_dict)
                whole = {"of": of, "state": state, "draws": self._states if self.draws_random_numbers else None}
                return encode_state(whole, origin=f"the state_dict of {self._named}")
        return ""

    @contextmanager
    def _drawing(self, *, is_reading: bool = True) -> Iterator[None]:
        """Inside, the global generators are this reader's own, unless reading was seen to leave them alone."""
        if self.draws_random_numbers is False:
            yield
            return
        with seeded(derive_key("stream", self._seed, self.epoch)):
            if self._states is not None:
                _set_generators(self._states)
            before = random_states()
            yield
            self._states = _generators()
            is_moved = before != random_states()
            if self.draws_random_numbers is None and (is_moved or is_reading):
                self.draws_random_numbers = is_moved

    def _own(self, call: Callable[[], T]) -> T:
        found: T = call_own(call, what=f"reading {self._named}", is_excused=is_out_of_memory, refusal=RunError)
        return found


def _generators() -> dict[str, Any]:
    """The states of the global generators, as values that can be kept."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def _set_generators(states: dict[str, Any]) -> None:
    try:
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"the state of a dataset holds generators that are none: {error}") from error


def _saved_state(text: str) -> dict[str, Any]:
    """What ``StreamReader`` kept of a dataset.

    Raises:
        RunError: it is something else.
    """
    saved = decode_state(text)
    if not isinstance(saved, dict) or set(saved) != {"of", "state", "draws"}:
        raise RunError("the state of a dataset cannot be read: it is not what a stream says of itself")
    return saved


def why_not_resumable(dataset: Any, *, seed: int) -> str | None:
    """Why an iterable dataset cannot go on at once where it was, for people; None when it can.

    One that says so is tried: a copy is read a little and asked for its state, a second copy is set there, and both must give the
    same sample next. Many a dataset counts a sample after it was handed out, or begins anew with each ``__iter__``.
    """
    named = type(dataset).__name__
    with keeping_draws():
        try:
            first, second = copy.deepcopy(dataset), copy.deepcopy(dataset)
        except Exception:  # Open files, locks, connections: it may raise anything.
            return None if has_state(dataset) else f"{named} has no state_dict"
        reader = StreamReader(first, seed=seed, position=Position())
        if len(reader.read(_LOOKED_AT)) < _LOOKED_AT:
            return None
        try:
            place = reader.position
        except RunError as error:
            return str(error)
        if not place.stream:
            return f"{named} has no state_dict"
        expected = reader.read(1)
        found = StreamReader(second, seed=seed, position=place).read(1)
    if is_same(expected, found):
        return None
    return (
        f"the state_dict of {named} after {_LOOKED_AT} samples does not lead to the sample after them; count a sample before it "
        "is handed out, and let __iter__ begin at what load_state_dict has set"
    )


def is_same(one: Any, other: Any) -> bool:
    """True when two samples are the same in every tensor and number; what cannot be compared counts as the same."""
    (ours, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    if form != other_form:
        return False
    for a, b in zip(ours, theirs, strict=True):
        try:
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                is_equal = a.shape == b.shape and torch.equal(a, b)
            else:
                is_equal = bool(np.array_equal(a, b))
        except Exception:  # An object of the user's own; it may raise anything.
            continue
        if not is_equal:
            return False
    return True
