"""From a ``[data]`` section to the three splits, in the rank that reads them."""

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from shoal.data.check import describe_text
from shoal.data.chosen import Chosen
from shoal.data.config import (
    AnyDataConfig,
    DigitsConfig,
    StdlibConfig,
    StoreConfig,
    SyntheticConfig,
    TableConfig,
    TextConfig,
    TokensConfig,
)
from shoal.data.loading.parts import options_of
from shoal.data.order import split_positions
from shoal.data.source import Splits as Splits
from shoal.data.source import Streamed
from shoal.data.sources.arrays import ArraySource, WindowSource
from shoal.data.sources.corpus import VOCAB, bigram_entropy, find_corpus, read_split
from shoal.data.sources.digits import DIGITS_SPEC, read_digits
from shoal.data.sources.own import build_own
from shoal.data.sources.rows import build_rows
from shoal.data.sources.storerows import build_store_splits
from shoal.data.sources.synthetic import describe_synthetic, make_arrays
from shoal.data.sources.tokens import open_tokens
from shoal.data.spec import DataSpec


def build_splits(config: AnyDataConfig, seed: int) -> Splits:
    """Train, validation and test of a source; the same on every rank.

    Args:
        config: the ``[data]`` section.
        seed: what synthetic data is made from, and what the user's own function draws. How data is split does not depend on it.

    Raises:
        RequestError: the data is missing, empty, too short or corrupt; the numbers and the fix are in the message.
    """
    found = _build(config, seed)
    if (config.order != "full" or config.replay) and not isinstance(found.train, Streamed):
        if config.replay_from is not None:
            Chosen(config.replay_from).refuse_beyond(len(found.train))
        train: Any = found.train
        train.options = replace(
            options_of(train),
            order=config.order,
            window=config.window,
            replay=config.replay,
            replay_last=config.replay_last,
            replay_from=config.replay_from,
        )
    return found


def _build(config: AnyDataConfig, seed: int) -> Splits:
    if isinstance(config, StdlibConfig | TextConfig):
        return _build_text(config)
    if isinstance(config, TokensConfig):
        return _build_tokens(config)
    if isinstance(config, StoreConfig):
        return build_store_splits(config)
    if isinstance(config, SyntheticConfig):
        return _build_synthetic(config, seed)
    if isinstance(config, DigitsConfig):
        found = read_digits()
        return _cut((found.images,), found.digits, config, DIGITS_SPEC, uniform_weight=1)
    if isinstance(config, TableConfig):
        return build_rows(config)
    return build_own(config, seed)


def _build_text(config: StdlibConfig | TextConfig) -> Splits:
    corpus = find_corpus(config)
    train = read_split(corpus.train)
    spec = replace(describe_text(config.sequence), baseline_loss=bigram_entropy(train))
    return Splits(
        train=WindowSource(train, config.sequence, vocab=VOCAB),
        validation=WindowSource(read_split(corpus.validation), config.sequence, vocab=VOCAB),
        test=WindowSource(read_split(corpus.test), config.sequence, vocab=VOCAB),
        spec=spec,
    )


def _build_tokens(config: TokensConfig) -> Splits:
    file = open_tokens(config)
    parts = split_positions(file.ids.size, config.validation, config.test, needed=config.sequence + 1, what="token ids")
    train, validation, test = (
        WindowSource(file.ids[part.start : part.stop], config.sequence, vocab=file.vocab) for part in parts
    )
    spec = DataSpec(kind="tokens", vocab=file.vocab, sequence=config.sequence, tokens_per_sample=config.sequence)
    return Splits(train=train, validation=validation, test=test, spec=spec, file=file.file)


def _build_synthetic(config: SyntheticConfig, seed: int) -> Splits:
    made = make_arrays(config, seed)
    weights = {"tokens": config.sequence, "reverse": None}
    return _cut(
        made.inputs, made.targets, config, describe_synthetic(config), uniform_weight=weights.get(config.kind, 1)
    )


def _cut(
    inputs: tuple[NDArray[Any], ...],
    targets: NDArray[Any],
    config: SyntheticConfig | DigitsConfig,
    spec: DataSpec,
    *,
    uniform_weight: int | None,
) -> Splits:
    train, validation, test = (
        ArraySource(inputs, targets, rows=rows, uniform_weight=uniform_weight)
        for rows in split_positions(len(targets), config.validation, config.test)
    )
    return Splits(train=train, validation=validation, test=test, spec=spec)
