"""An iterable dataset as a source: read from the front by loaders, with its first samples at hand for looks at them."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import IterableDataset

from shoal.core.errors import RunError
from shoal.core.functions import call_own
from shoal.data.batches.collate import Collator
from shoal.data.options import LoaderOptions
from shoal.data.order import Position
from shoal.data.source import Items, SampleIds
from shoal.data.spec import UNKNOWN_LENGTH
from shoal.data.streams.shards import take_shard
from shoal.data.streams.streamreader import StreamReader, has_state, known_length, why_not_resumable
from shoal.telemetry.memory import is_out_of_memory
from shoal.telemetry.rngstate import keeping_draws

_AT_HAND = 16
"""First samples that are kept for looks: at a module's shapes, at what the data is."""
_COUNTED_AT_ONCE = 1024


def is_iterable_only(dataset: Any) -> bool:
    """True for what can be iterated and not indexed."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


class IterableSource:
    """An iterable dataset. ``len`` is what the dataset says, or ``UNKNOWN_LENGTH``.

    Args:
        dataset: iterable, from the beginning each time it is iterated.
        collator: makes batches of its samples.
        options: how it is loaded.
        seed: of the run, for looks at it.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collator: Collator,
        options: LoaderOptions | None = None,
        seed: int = 0,
    ) -> None:
        self._dataset = dataset
        self.collator = collator
        self._seed = seed
        self._cursor: StreamReader | None = None
        self._num_counted: int | None = None
        self._counted_to = 0
        self.options = options or LoaderOptions()

    def __len__(self) -> int:
        length = known_length(self._dataset)
        return UNKNOWN_LENGTH if length is None else length

    @property
    def dataset(self) -> Any:
        """The user's own."""
        return self._dataset

    @property
    def uniform_weight(self) -> int | None:
        """See ``Source``."""
        return self.collator.uniform_weight

    @cached_property
    def why_not_resumable(self) -> str | None:
        """Why a resumed run has to read again what was trained on, for people; None where it goes on at once."""
        return why_not_resumable(self._dataset, seed=self._seed)

    def open_stream(self, *, seed: int, position: Position) -> StreamReader:
        """See ``Streamed``."""
        return StreamReader(self._dataset, seed=seed, position=position, uses_state=self.why_not_resumable is None)

    def collate_samples(self, samples: Sequence[Any], numbers: Sequence[int]) -> Items:
        """See ``Streamed``."""
        return self.collator.collate(samples, lambda place: f"sample {numbers[place]} of the stream")

    def take_shard(self, *, replica: int, num_replicas: int) -> "IterableSource":
        """See ``Streamed``."""
        found = take_shard(self._dataset, replica=replica, num_replicas=num_replicas)
        return IterableSource(found, collator=self.collator, options=self.options, seed=self._seed)

    def count(self, most: int) -> int:
        """See ``Streamed``."""
        known = known_length(self._dataset)
        if known is not None:
            return min(known, most)
        if self._num_counted is None or self._num_counted == self._counted_to < most:
            # An endless stream is read as far as it is asked for, and no further.
            reader = self._open_copy()
            while reader.offset < most and reader.read(min(most - reader.offset, _COUNTED_AT_ONCE)):
                pass
            self._num_counted, self._counted_to = reader.offset, most
        return min(most, self._num_counted)

    def collate(self, ids: SampleIds) -> Items:
        """The samples at these places of the first epoch: at once for the first few, else by reading up to them.

        Raises:
            RunError: the stream ends before one of them.
        """
        numbers = [int(one) for one in ids]
        if numbers and max(numbers) < len(self._first):
            return self.collate_samples([self._first[number] for number in numbers], numbers)
        return self.collate_samples(self._read_up_to(numbers), numbers)

    @cached_property
    def _first(self) -> list[Any]:
        return first_samples(self._dataset, _AT_HAND, seed=self._seed)

    def _read_up_to(self, numbers: Sequence[int]) -> list[Any]:
        wanted = sorted(set(numbers))
        if self._cursor is None or wanted[0] < self._cursor.offset:
            self._cursor = self._open_copy()
        found: dict[int, Any] = {}
        for number in wanted:
            self._cursor.read(number - self._cursor.offset)
            read = self._cursor.read(1)
            if not read:
                raise RunError(f"{type(self._dataset).__name__} ended before sample {number}, which was asked for")
            found[number] = read[0]
        return [found[number] for number in numbers]

    def _open_copy(self) -> StreamReader:
        """The stream from its beginning, in a copy: the loader moves the dataset itself."""
        copied = self._own(lambda: copy.deepcopy(self._dataset))
        return StreamReader(copied, seed=self._seed, position=Position(), uses_state=False)

    def _own(self, call: Callable[[], Any]) -> Any:
        what = f"reading the iterable dataset {type(self._dataset).__name__}"
        return call_own(call, what=what, is_excused=is_out_of_memory, refusal=RunError)


def first_samples(dataset: Any, count: int, *, seed: int = 0) -> list[Any]:
    """The first samples of an iterable dataset, as a run under this seed reads them; the dataset is left where it was."""
    with keeping_draws():
        try:
            copied = copy.deepcopy(dataset)
        except Exception:  # Open files, locks, connections: it may raise anything.
            state = copy.deepcopy(dataset.state_dict()) if has_state(dataset) else None
            found = StreamReader(dataset, seed=seed, position=Position(), uses_state=False).read(count)
            if state is not None:
                dataset.load_state_dict(state)
            return found
        return StreamReader(copied, seed=seed, position=Position(), uses_state=False).read(count)
