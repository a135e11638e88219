"""Samples that are windows of one long row of tokens: sample i reads tokens[i*L : i*L + L + 1], inputs and the next tokens."""

from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shoal.core.errors import RunError
from shoal.data.digest import digest_arrays
from shoal.data.source import Items, SampleIds


class WindowSource:
    """Windows over an array or a memory map. No copy is made until a batch is: a batch is one gather of rows."""

    def __init__(self, tokens: NDArray[Any], sequence: int, *, vocab: int) -> None:
        num_samples = max(0, (len(tokens) - 1) // sequence)
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
