"""The bigram entropy of a text: the loss of the best guess from one token to the next, and so the bar that a model must pass."""

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22


def bigram_entropy(tokens: NDArray[np.uint8], vocab: int = 256) -> float:
    """H(next | this) of the text's own pair counts, in nats per token; 0 for a text without a pair."""
    counts: NDArray[np.int64] = np.zeros(vocab * vocab, dtype=np.int64)
    # In chunks, because the pair numbers take eight times the memory of the text.
    for start in range(0, len(tokens) - 1, _CHUNK):
        chunk = tokens[start : start + _CHUNK + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * vocab + chunk[1:], minlength=vocab * vocab)
    total = int(counts.sum())
    if total == 0:
        return 0.0
    pairs = counts[counts > 0].astype(np.float64)
    firsts = counts.reshape(vocab, vocab).sum(axis=1)
    firsts = firsts[firsts > 0].astype(np.float64)
    return float((np.sum(firsts * np.log(firsts)) - np.sum(pairs * np.log(pairs))) / total)
