"""Data made from a seed, each kind with a rule that a model can learn. numpy only.

Every sample is a function of (seed, kind, sizes), never of who reads it. The sizes are small, so all of it is made at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.seeding import derive_key
from shoal.data.config import SyntheticConfig
from shoal.data.spec import IGNORED, DataSpec

PADDING, START, END = 0, 1, 2
"""The first token ids of pairs: padding in the source, the token before the first target, the token after the last."""

_NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """All samples, one per row."""

    inputs: tuple[NDArray[Any], ...]
    targets: NDArray[Any]


def make_arrays(config: SyntheticConfig, seed: int) -> Arrays:
    """The samples of a synthetic source."""
    generator = np.random.Generator(np.random.Philox(key=derive_key("synthetic", seed, config.kind)))
    if config.kind == "tokens":
        return _make_tokens(config, generator)
    if config.kind == "classes":
        return _make_classes(config, generator)
    if config.kind == "regression":
        return _make_regression(config, generator)
    return _make_reversed(config, generator)


def describe_synthetic(config: SyntheticConfig) -> DataSpec:
    """The shapes of a synthetic source."""
    if config.kind == "tokens":
        return DataSpec(kind="tokens", vocab=config.vocab, sequence=config.sequence, tokens_per_sample=config.sequence)
    if config.kind == "classes":
        return DataSpec(kind="classes", features=config.features, classes=config.classes)
    if config.kind == "regression":
        return DataSpec(kind="regression", features=config.features, outputs=config.outputs)
    return DataSpec(kind="pairs", vocab=config.vocab, sequence=config.sequence, tokens_per_sample=config.sequence)


def _make_tokens(config: SyntheticConfig, generator: np.random.Generator) -> Arrays:
    """Each sample counts on by its own stride; one token in ten is noise, after which it counts on from there."""
    rows: NDArray[np.int64] = np.empty((config.samples, config.sequence + 1), dtype=np.int64)
    strides = generator.integers(1, 4, size=config.samples)
    rows[:, 0] = generator.integers(0, config.vocab, size=config.samples)
    for column in range(1, config.sequence + 1):
        is_noise = generator.random(config.samples) < _NOISE
        noise = generator.integers(0, config.vocab, size=config.samples)
        rows[:, column] = np.where(is_noise, noise, (rows[:, column - 1] + strides) % config.vocab)
    return Arrays(inputs=(np.ascontiguousarray(rows[:, :-1]),), targets=np.ascontiguousarray(rows[:, 1:]))


def _make_classes(config: SyntheticConfig, generator: np.random.Generator) -> Arrays:
    """Normal clouds around one centre per class."""
    centres = generator.standard_normal((config.classes, *config.features))
    targets = generator.integers(0, config.classes, size=config.samples)
    clouds = centres[targets] + 0.5 * generator.standard_normal((config.samples, *config.features))
    return Arrays(inputs=(clouds.astype(np.float32),), targets=targets)


def _make_regression(config: SyntheticConfig, generator: np.random.Generator) -> Arrays:
    """tanh of a random projection, with a little noise."""
    inputs = generator.standard_normal((config.samples, *config.features))
    flat = inputs.reshape(config.samples, -1)
    projection = generator.standard_normal((flat.shape[1], config.outputs)) / np.sqrt(flat.shape[1])
    targets = np.tanh(flat @ projection) + 0.01 * generator.standard_normal((config.samples, config.outputs))
    return Arrays(inputs=(inputs.astype(np.float32),), targets=targets.astype(np.float32))


def _make_reversed(config: SyntheticConfig, generator: np.random.Generator) -> Arrays:
    """Words of every length up to ``sequence`` - 1, and the same backwards; what is behind a word's end is padded and ignored."""
    shape = (config.samples, config.sequence)
    lengths = generator.integers(1, config.sequence, size=config.samples)[:, None]
    words = generator.integers(END + 1, config.vocab, size=shape)
    column = np.arange(config.sequence)[None, :]
    is_word = column < lengths
    source = np.where(is_word, words, PADDING)
    backwards = np.take_along_axis(words, np.where(is_word, lengths - 1 - column, 0), axis=1)
    targets = np.where(is_word, backwards, np.where(column == lengths, END, IGNORED))
    target_in = np.full(shape, PADDING, dtype=np.int64)
    target_in[:, 0] = START
    target_in[:, 1:] = np.where(is_word, backwards, PADDING)[:, :-1]
    return Arrays(inputs=(source, target_in), targets=targets)
