"""What the loader asks of data: how many samples there are, and the tensors of some of them; and the three splits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batchform import BatchForm, ModelInputs, Targets
from shoal.data.order import Position
from shoal.data.spec import DataSpec, WatchedFile
from shoal.data.streams.streamreader import StreamReader

SampleIds = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Items:
    """The tensors of some samples, as a model and its loss take them."""

    inputs: tuple[Tensor, ...]
    targets: Targets
    weight: int
    """How many items the mean loss is over: tokens for text, samples for classes, targets that are not ignored for pairs."""
    form: BatchForm | None = None
    """How the tensors make the call; None for ``model(*inputs)`` and ``loss(output, targets)``."""

    @property
    def model_inputs(self) -> ModelInputs:
        """The inputs with their form, to be handed to ``call_model``."""
        return ModelInputs(self.inputs, self.form)


class Source(Protocol):
    """One split, map-style. Sample i is the same on every rank and in every epoch."""

    def __len__(self) -> int:
        """Number of samples."""

    @property
    def uniform_weight(self) -> int | None:
        """The weight of every sample where it is the same for all, so that nobody has to count; None where it varies."""

    def collate(self, ids: SampleIds) -> Items:
        """The samples with these ids, in this order."""


@runtime_checkable
class Streamed(Source, Protocol):
    """A source that can only be read from the front: an iterable dataset. ``collate`` is for looks and evaluations: it reads the
    stream up to the samples that are asked for."""

    @property
    def dataset(self) -> Any:
        """The user's own."""

    def open_stream(self, *, seed: int, position: Position) -> StreamReader:
        """The stream, at a position."""

    def take_shard(self, *, replica: int, num_replicas: int) -> "Streamed":
        """What one replica reads, of a dataset that shards itself."""

    def count(self, most: int) -> int:
        """Samples of an epoch, or ``most`` where there are more; read through where the dataset does not say."""

    def collate_samples(self, samples: Sequence[Any], numbers: Sequence[int]) -> Items:
        """Samples that were read, as one batch; ``numbers`` are their places in the epoch."""


class Watched(Protocol):
    """Files under a run."""

    def find_damage(self) -> str | None:
        """What was done to one of them since they were opened, with its name; None where samples are as they were."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Train, validation and test; a split whose share is 0 has no sample."""

    train: Source
    validation: Source
    test: Source
    spec: DataSpec
    file: WatchedFile | None = None
    """Where samples are read from a file while a run trains: that file, as it was when it was opened."""
    watched: Watched | None = None
    """Where samples are read from several files while a run trains: what knows how they were."""
