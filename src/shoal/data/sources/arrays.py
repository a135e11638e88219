"""Samples out of arrays: their rows (digits, everything synthetic), or windows of one long sequence of tokens.

Sample i of a token sequence reads tokens[i*L : i*L + L + 1]: the inputs, and the same one token later as targets.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shoal.core.errors import RunError
from shoal.data.options import LoaderOptions
from shoal.data.source import Items, SampleIds
from shoal.data.spec import IGNORED

_WHOLE_BYTES = 1 << 29
"""Up to this everything is read; it takes a tenth of a second."""
_BLOCK = 1 << 16
_NUM_BLOCKS = 1 << 10


def digest_arrays(*arrays: NDArray[Any]) -> str:
    """A hash of arrays: of every byte, or of blocks all over one that would take long to read."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        # By rows: a block of a memory map is all that is read of it.
        step = max(1, _BLOCK // max(1, array[:1].nbytes))
        starts = range(0, len(array), step)
        if array.nbytes > _WHOLE_BYTES:
            starts = starts[:: max(1, len(starts) // _NUM_BLOCKS)]
        for start in starts:
            digest.update(np.ascontiguousarray(array[start : start + step]).view(np.uint8).data)
    return digest.hexdigest()


class ArraySource:
    """Some rows of the inputs and the targets; a batch is one gather per array."""

    def __init__(
        self, inputs: Sequence[NDArray[Any]], targets: NDArray[Any], *, rows: range, uniform_weight: int | None
    ) -> None:
        part = slice(rows.start, rows.stop)
        self.options = LoaderOptions()
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


class WindowSource:
    """Windows over an array or a memory map. No copy is made until a batch is: a batch is one gather of rows."""

    def __init__(self, tokens: NDArray[Any], sequence: int, *, vocab: int) -> None:
        num_samples = max(0, (len(tokens) - 1) // sequence)
        self.options = LoaderOptions()
        # Rows overlap by one token: the last target of a sample is the first input of the next.
        self._rows = as_strided(
            tokens,
            shape=(num_samples, sequence + 1),
            strides=(sequence * tokens.itemsize, tokens.itemsize),
            writeable=False,
        )
        self._tokens = tokens
        self._sequence = sequence
        self._vocab = vocab
        self._can_exceed = np.iinfo(tokens.dtype).max >= vocab or np.iinfo(tokens.dtype).min < 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def uniform_weight(self) -> int | None:
        """Every sample has as many targets as tokens."""
        return self._sequence

    def digest(self) -> str:
        """A hash of all tokens."""
        return digest_arrays(self._tokens)

    def collate(self, ids: SampleIds) -> Items:
        """Inputs (B, L) and targets (B, L), the targets one token later.

        Raises:
            RunError: a token is outside the vocabulary; large token files are only sampled before the run.
        """
        rows = self._rows[np.asarray(ids, dtype=np.int64)].astype(np.int64)
        if self._can_exceed and rows.size and (rows.max() >= self._vocab or rows.min() < 0):
            worst = int(np.flatnonzero(((rows >= self._vocab) | (rows < 0)).any(axis=1))[0])
            raise RunError(
                f"sample {ids[worst]} of the token file holds an id from {rows[worst].min()} to {rows[worst].max()} and the "
                f"vocabulary is {self._vocab}; raise data.vocab, or mend the file"
            )
        tokens = torch.from_numpy(rows)
        return Items(inputs=(tokens[:, :-1],), targets=tokens[:, 1:], weight=rows.shape[0] * self._sequence)
