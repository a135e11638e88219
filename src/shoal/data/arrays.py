"""Samples that are rows of arrays in memory: digits and everything synthetic."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.digest import digest_arrays
from shoal.data.source import Items, SampleIds
from shoal.data.spec import IGNORED


class ArraySource:
    """Some rows of the inputs and the targets; a batch is one gather per array."""

    def __init__(
        self, inputs: Sequence[NDArray[Any]], targets: NDArray[Any], *, rows: range, uniform_weight: int | None
    ) -> None:
        part = slice(rows.start, rows.stop)
        self._inputs = tuple(array[part] for array in inputs)
        self._targets = targets[part]
        self._uniform_weight = uniform_weight

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def uniform_weight(self) -> int | None:
        """The weight of every sample, or None where padding makes it vary."""
        return self._uniform_weight

    def digest(self) -> str:
        """A hash of all samples."""
        return digest_arrays(*self._inputs, self._targets)

    def collate(self, ids: SampleIds) -> Items:
        """The rows with these ids."""
        chosen = np.asarray(ids, dtype=np.int64)
        targets = self._targets[chosen]
        uniform = self._uniform_weight
        weight = int(np.count_nonzero(targets != IGNORED)) if uniform is None else uniform * len(chosen)
        inputs = tuple(torch.from_numpy(array[chosen]) for array in self._inputs)
        return Items(inputs=inputs, targets=torch.from_numpy(targets), weight=weight)
