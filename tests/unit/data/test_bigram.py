"""Bigram entropy against counting by hand."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from shoal.data import bigram
from shoal.data.bigram import bigram_entropy


def _by_hand(tokens: list[int]) -> float:
    pairs, firsts = Counter(pairwise(tokens)), Counter(tokens[:-1])
    return -sum(n * math.log(n / firsts[first]) for (first, _), n in pairs.items()) / (len(tokens) - 1)


def test_it_is_the_formula() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, size=1000).astype(np.uint8)
    assert bigram_entropy(tokens) == pytest.approx(_by_hand(tokens.tolist()))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, size=1000).astype(np.uint8)
    whole = bigram_entropy(tokens)
    monkeypatch.setattr(bigram, "_CHUNK", 7)
    assert bigram_entropy(tokens) == pytest.approx(whole, abs=1e-12)


def test_what_is_certain_has_none_and_what_is_even_has_all() -> None:
    assert bigram_entropy(np.tile(np.array([1, 2, 3], dtype=np.uint8), 50)) == 0.0
    assert bigram_entropy(np.zeros(1, dtype=np.uint8)) == 0.0
    even = np.random.default_rng(0).integers(0, 4, size=200_000).astype(np.uint8)
    assert bigram_entropy(even) == pytest.approx(math.log(4), abs=1e-3)
