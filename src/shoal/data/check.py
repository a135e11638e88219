"""What the data is, or why it cannot be used, found out before any process starts and without torch.

The number of samples comes from file sizes; nothing is read but token files, whose ids must be inside the vocabulary.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass

from shoal.core.units import format_bytes
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
    load_build,
)
from shoal.data.order import split_positions
from shoal.data.partition.cut import NAMES
from shoal.data.prepare import prepare_rows, say_unknown
from shoal.data.sources.corpus import VOCAB, find_corpus
from shoal.data.sources.digits import DIGITS_SPEC, NUM_DIGITS, require_digits
from shoal.data.sources.storefile import open_store_data
from shoal.data.sources.synthetic import describe_synthetic
from shoal.data.sources.tokens import open_tokens
from shoal.data.spec import DataSpec
from shoal.data.tiers.config import check_cache


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The data in numbers. Of the user's own data nothing is known before it is built: ``spec`` and the counts are None."""

    spec: DataSpec | None
    train: int | None
    """Samples to train on."""
    validation: int | None
    test: int | None
    description: str
    """One line for people."""


def check_data(config: AnyDataConfig) -> DataSummary:
    """Look at the data as far as can be done quickly.

    Raises:
        RequestError: the data is missing, empty, too short or corrupt, or samples are to be replayed that it has not; the numbers
            and the fix are in the message.
    """
    found = _summarize(config)
    if config.replay_from is not None and found.train is not None:
        Chosen(config.replay_from).refuse_beyond(found.train)
    return found


def _summarize(config: AnyDataConfig) -> DataSummary:
    if isinstance(config, StdlibConfig | TextConfig):
        return _check_text(config)
    if isinstance(config, TokensConfig):
        file = open_tokens(config)
        needed = config.sequence + 1
        parts = split_positions(file.ids.size, config.validation, config.test, needed=needed, what="token ids")
        spec = DataSpec(kind="tokens", vocab=file.vocab, sequence=config.sequence, tokens_per_sample=config.sequence)
        counts = [count_windows(len(part), config.sequence) for part in parts]
        return _summary(spec, counts, f"{file.ids.size} token ids of {file.vocab} in {config.path}")
    if isinstance(config, StoreConfig):
        data = open_store_data(config)
        lines = [f"version {data.reader.version} of {config.path}, {len(data.reader)} rows"]
        if data.prepared is not None:
            lines += say_unknown(dict(zip(NAMES, data.prepared.unknown, strict=True)))
        return _summary(data.spec, data.counts, "; ".join(lines))
    if isinstance(config, SyntheticConfig):
        parts = split_positions(config.samples, config.validation, config.test)
        return _summary(
            describe_synthetic(config), _lengths(parts), f"synthetic {config.kind}, {config.samples} samples"
        )
    if isinstance(config, DigitsConfig):
        require_digits()
        parts = split_positions(NUM_DIGITS, config.validation, config.test)
        return _summary(DIGITS_SPEC, _lengths(parts), f"{NUM_DIGITS} images of digits")
    if isinstance(config, TableConfig):
        found = prepare_rows(config)
        return _summary(found.spec, [len(found.splits[name]) for name in NAMES], "; ".join(found.lines))
    load_build(config)
    return DataSummary(spec=None, train=None, validation=None, test=None, description=f"your own, by {config.build}")


def check_room(config: AnyDataConfig, *, num_ranks: int) -> None:
    """Refuse a cache that this machine has no room for.

    Args:
        config: the data; what is kept near of it is for each rank.
        num_ranks: of this host that read data.

    Raises:
        RequestError: names what is asked for and what is there.
    """
    if isinstance(config, StoreConfig | TableConfig):
        check_cache(config.cache, num_ranks=num_ranks)


def order_problems(config: AnyDataConfig) -> list[str]:
    """Orders of samples that workers of parameter servers do not follow, each with its fix."""
    found = ["order"] if config.order != "full" else []
    found += ["replay"] if config.replay else []
    return [
        f"workers find the samples of any step by its number, in a full shuffle of each sample once, and data.{key} asks for "
        f"others; leave data.{key} out, or use a plan with dp"
        for key in found
    ]


def describe_text(sequence: int) -> DataSpec:
    """The shapes of a text; its bigram entropy is left to whoever reads the text."""
    return DataSpec(kind="tokens", vocab=VOCAB, sequence=sequence, tokens_per_sample=sequence)


def count_windows(num_tokens: int, sequence: int) -> int:
    """Samples in a row of tokens: each reads one token more than it steps."""
    return max(0, (num_tokens - 1) // sequence)


def _check_text(config: StdlibConfig | TextConfig) -> DataSummary:
    corpus = find_corpus(config)
    splits = (corpus.train, corpus.validation, corpus.test)
    num_bytes = sum(split.num_tokens for split in splits)
    where = "the standard library" if isinstance(config, StdlibConfig) else config.path
    return _summary(
        describe_text(config.sequence),
        [count_windows(split.num_tokens, config.sequence) for split in splits],
        f"{corpus.num_files} files, {format_bytes(num_bytes)} of {where}",
    )


def _lengths(parts: Sequence[Sized]) -> list[int]:
    return [len(part) for part in parts]


def _summary(spec: DataSpec, counts: Sequence[int], description: str) -> DataSummary:
    train, validation, test = counts
    return DataSummary(spec=spec, train=train, validation=validation, test=test, description=description)
