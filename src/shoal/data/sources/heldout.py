"""The first samples of an iterable dataset, held out; training begins after them in every epoch.

A stream cannot be cut by shares, because nobody knows how long it is. What it begins with can be kept aside, as long as it begins
alike in every epoch: one that shuffles would train on what it is judged by, and is refused.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from shoal.core.errors import RequestError
from shoal.data.order import Position
from shoal.data.sources.iterable import first_samples
from shoal.data.streams.shards import shards_itself
from shoal.data.streams.streamreader import StreamReader, is_same
from shoal.telemetry.rngstate import keeping_draws


class AfterFirst:
    """An iterable dataset without its first samples. All else is that dataset's own: its state, ``set_epoch``, what it says of
    its samples.

    Args:
        dataset: iterable.
        num_left_out: samples that each epoch begins with, and that are not given.
    """

    def __init__(self, dataset: Any, num_left_out: int) -> None:
        self._dataset, self._num_left_out = dataset, num_left_out
        self._goes_on = False

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._dataset)
        # A state that was loaded is after them already.
        if not self._goes_on:
            next(itertools.islice(iterator, self._num_left_out, self._num_left_out), None)
        self._goes_on = False
        return iterator

    def __len__(self) -> int:
        return max(0, len(self._dataset) - self._num_left_out)

    def __getattr__(self, name: str) -> Any:
        """What else the dataset has.

        Raises:
            AttributeError: it has none of this name.
        """
        # Of an object that is being copied even these are not there yet.
        if name.startswith("__") or name in ("_dataset", "_num_left_out", "_goes_on"):
            raise AttributeError(name)
        found = getattr(self._dataset, name)
        return self._noting(found) if name == "load_state_dict" else found

    def _noting(self, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def load_state_dict(state: Any) -> Any:
            self._goes_on = True
            return load(state)

        return load_state_dict


def hold_out_first(dataset: Any, count: int, *, seed: int) -> tuple[list[Any], AfterFirst]:
    """The first samples of a stream, and the stream after them.

    Args:
        dataset: iterable.
        count: of the samples.
        seed: of the run.

    Raises:
        RequestError: it has no more than these, begins otherwise in another epoch, or shards itself.
    """
    name = type(dataset).__name__
    if shards_itself(dataset):
        raise RequestError(
            f"data.hold_out {count}: {name} shards itself, so that there is no first sample of all; return a dict with train and "
            "validation from data.build"
        )
    found = first_samples(dataset, count + 1, seed=seed)
    if len(found) <= count:
        raise RequestError(
            f"data.hold_out {count} leaves nothing for training: {name} yields {len(found)} samples; hold out fewer"
        )
    if (again := _first_of_next_epoch(dataset, count, seed)) is not None and not is_same(found[:count], again):
        raise RequestError(
            f"data.hold_out {count}: {name} begins with other samples in its second epoch, so some of these would be trained on; "
            "shuffle after the held-out ones, or return a dict with train and validation from data.build"
        )
    return found[:count], AfterFirst(dataset, count)


def _first_of_next_epoch(dataset: Any, count: int, seed: int) -> list[Any] | None:
    """The first samples of the second epoch; None where that cannot be seen without moving the dataset."""
    with keeping_draws():
        try:
            copied = copy.deepcopy(dataset)
        except Exception:  # Open files, locks, connections: it may raise anything.
            return None
        return StreamReader(copied, seed=seed, position=Position(epoch=1), uses_state=False).read(count)
