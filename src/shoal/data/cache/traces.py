"""Access traces as training makes them, on which policies are compared. Each is a pure function of its seed.

``scan`` reads everything in the same order in every pass; ``shuffle`` in another one; ``zipf`` asks for skewed keys, and
``zipf+scan`` has a scan pass after each such pass; ``append`` asks for what has arrived lately while more arrives. ``sample
shuffle`` and ``window shuffle`` are blocks of rows, in the order in which a full shuffle of the rows needs them and in that of a
shuffle inside windows of blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Keys in the order in which they are asked for."""

    name: str
    keys: Keys
    num_keys: int
    """Of the different ones, at the end."""
    warm: int
    """Accesses before this one fill the cache and do not count."""


def _zipf(random: np.random.Generator, count: int, num_keys: int, exponent: float) -> Keys:
    weights = np.arange(1, num_keys + 1) ** -exponent
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), random.random(count))
    return np.minimum(ranks, num_keys - 1).astype(np.int64)


def _scan(random: np.random.Generator, keys: int, passes: int) -> Keys:
    return np.tile(np.arange(keys), passes)


def _shuffle(random: np.random.Generator, keys: int, passes: int) -> Keys:
    return np.concatenate([random.permutation(keys) for _ in range(passes)])


def _skewed(random: np.random.Generator, keys: int, passes: int) -> Keys:
    return random.permutation(keys)[_zipf(random, keys * passes, keys, 0.9)]


def _skewed_and_scan(random: np.random.Generator, keys: int, passes: int) -> Keys:
    names = random.permutation(keys)
    parts = [names[_zipf(random, keys, keys, 0.9)] if at % 2 == 0 else np.arange(keys) for at in range(passes)]
    return np.concatenate(parts)


def _append(random: np.random.Generator, keys: int, passes: int) -> Keys:
    count = keys * passes
    newest = keys // 4 + np.arange(count) * (keys - keys // 4) // count
    return np.asarray(np.maximum(0, newest - _zipf(random, count, keys, 1.1)), dtype=np.int64)


_MADE: dict[str, Callable[[np.random.Generator, int, int], Keys]] = {
    "scan": _scan,
    "shuffle": _shuffle,
    "zipf": _skewed,
    "zipf+scan": _skewed_and_scan,
    "append": _append,
}


def build_traces(seed: int = 1, *, num_keys: int = 1000, passes: int = 12) -> list[Trace]:
    """The five traces of single keys; the first pass, of ``zipf+scan`` the first two, fills the cache."""
    traces = []
    for place, (name, make) in enumerate(_MADE.items()):
        keys = make(np.random.default_rng([seed, place]), num_keys, passes).astype(np.int64)
        warm = num_keys * (2 if name == "zipf+scan" else 1)
        traces.append(Trace(name=name, keys=keys, num_keys=num_keys, warm=warm))
    return traces


def build_block_traces(
    seed: int = 1, *, num_blocks: int = 400, rows: int = 32, window: int = 64, epochs: int = 3
) -> list[Trace]:
    """Blocks as rows of theirs are asked for: rows shuffled over everything, and blocks shuffled with rows inside windows."""
    random = np.random.default_rng([seed, 100])
    full = [random.permutation(num_blocks * rows) // rows for _ in range(epochs)]
    windows = []
    for _ in range(epochs):
        blocks = random.permutation(num_blocks)
        for at in range(0, num_blocks, window):
            inside = np.repeat(blocks[at : at + window], rows)
            windows.append(random.permutation(inside))
    warm = num_blocks * rows
    return [
        Trace(name="sample shuffle", keys=np.concatenate(full).astype(np.int64), num_keys=num_blocks, warm=warm),
        Trace(name="window shuffle", keys=np.concatenate(windows).astype(np.int64), num_keys=num_blocks, warm=warm),
    ]
