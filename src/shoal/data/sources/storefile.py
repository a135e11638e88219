"""What a ``[data]`` section makes of a store, before any process starts: which version, rows and shapes. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from shoal.core.errors import RequestError, RunError
from shoal.data.config import StoreConfig
from shoal.data.order import split_positions
from shoal.data.prepare import refuse_rounding
from shoal.data.sources.preparedstore import PreparedStore, is_prepared, prepare_store
from shoal.data.sources.storecache import StoreCache
from shoal.data.spec import DataSpec
from shoal.data.store.folder import open_folder
from shoal.data.store.reader import StoreReader, newest_version, open_store
from shoal.data.store.selection import RowSelection
from shoal.data.store.splits import PARTS, Split, read_split
from shoal.data.store.tokens import TokenSequence, choose_tokens
from shoal.data.table import Field
from shoal.data.tiers.config import check_cache
from shoal.data.transform.blocks import fit_shards

_UNPACKED_BYTES = 32 * 2**20
"""Of blocks as tables, beside what the cache holds."""


@dataclass(frozen=True, kw_only=True)
class StoreData:
    """A store as a recipe uses it."""

    reader: StoreReader
    spec: DataSpec
    parts: tuple[RowSelection, RowSelection, RowSelection]
    """Rows of train, validation and test; of a sequence of tokens the places of its ids."""
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    tokens: TokenSequence | None = None
    """Where samples are windows of token ids."""
    cache: StoreCache | None = None
    """Of blocks of another machine."""
    follows: bool = False
    """The run takes up newer versions."""
    prepared: PreparedStore | None = None
    """Where rows go through steps or a vocabulary."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples of train, validation and test."""
        train, validation, test = (self._count(len(part)) for part in self.parts)
        return train, validation, test

    def _count(self, length: int) -> int:
        if self.tokens is None:
            return length
        assert self.spec.sequence is not None
        return max(0, (length - 1) // self.spec.sequence)

    def newest_version(self) -> int:
        """Of the store, as it is now."""
        return self.reader.folder.newest_version() or self.reader.version

    def grown(self, version: int) -> "StoreData":
        """A newer version of the same columns.

        Raises:
            RequestError: there is no such version.
            RunError: it has other columns, values are missing, or a class is beyond those that the model was made for.
        """
        reader = self.reader.at_version(version)
        origin = f"version {version} of {self.reader.folder.address}"
        if reader.manifest.schema != self.reader.manifest.schema or len(reader) < len(self.reader):
            raise RunError(
                f"{origin} does not go on from version {self.reader.version}: it has other columns, or fewer rows"
            )
        if self.prepared is not None:
            made = self.prepared.grown(reader, origin)
            return replace(self, reader=reader, parts=made.parts, prepared=made)
        for number in range(self.reader.num_blocks, reader.num_blocks):
            stats = reader.block_stats(number)
            for name in (*self.inputs, *self.targets):
                if stats[name].missing:
                    raise RunError(
                        f"{origin} has rows without a value in column {name!r}, which the model takes; they were "
                        f"appended in block {number}"
                    )
            highest = stats[self.targets[0]].max if self.spec.kind == "classes" else None
            if highest is not None and self.spec.classes is not None and highest >= self.spec.classes:
                raise RunError(
                    f"{origin} has the class {int(highest)} in column {self.targets[0]!r}, and the model was made for "
                    f"{self.spec.classes} classes; train a new model on it, or leave such rows out"
                )
        return replace(self, reader=reader, tokens=self._grown_tokens(reader, origin))

    def _grown_tokens(self, reader: StoreReader, origin: str) -> TokenSequence | None:
        if self.tokens is None:
            return None
        tokens = TokenSequence(reader, self.inputs[0])
        if tokens.lowest < 0 or (self.spec.vocab is not None and tokens.highest >= self.spec.vocab):
            raise RunError(
                f"{origin} has token ids from {tokens.lowest} to {tokens.highest} in column {self.inputs[0]!r}, and the "
                f"model was made for 0 to {(self.spec.vocab or 0) - 1}; set data.vocab to {tokens.highest + 1} or more and "
                "train a new model"
            )
        return tokens

    def digest(self, part: RowSelection) -> str:
        """Of the samples of a part: of the digests of all blocks, the rows, and the columns in their order."""
        found = xxhash.xxh3_64(self.reader.block_list.digests.tobytes())
        found.update(part.starts.tobytes() + part.stops.tobytes())
        found.update(repr((self.inputs, self.targets, self.spec.sequence)).encode())
        if self.prepared is not None:
            columns = self.prepared.columns
            found.update(f"{dict(columns.inputs)}{columns.targets}{columns.fitted.digest}".encode())
        return found.hexdigest()


def pin_version(config: StoreConfig) -> StoreConfig:
    """The section with the version that it means now, so that what is appended later changes nothing.

    Raises:
        RequestError: there is no store.
    """
    if config.version is not None:
        return config
    version = newest_version(config.path, config.storage)
    if version is None:
        raise RequestError(
            f"data.path: {config.path} is no store of data; make one with: shoal data build SRC {config.path}"
        )
    return config.model_copy(update={"version": version})


def open_store_data(config: StoreConfig) -> StoreData:
    """Open the store of a recipe.

    Raises:
        RequestError: there is no store or no such version, a column or split does not fit, or the rows are too few.
        BrokenFile: a manifest or a list of blocks is not what was written.
    """
    config = pin_version(config)
    cache = _open_cache(config)
    cached: dict[str, Any] = {} if cache is None else {"fetch": cache.fetch, "fetched_bytes": _UNPACKED_BYTES}
    reader = open_store(config.path, version=config.version, load=config.load, settings=config.storage, **cached)
    split = None if config.split is None else read_split(reader.folder, config.split)
    if split is not None and split.num_rows > len(reader):
        raise RequestError(
            f"data.split: {split.name!r} was made for version {split.version} with {split.num_rows} rows, and version "
            f"{reader.version} has {len(reader)}; use a version from {split.version} on"
        )
    opened = _open_rows if config.sequence is None else _open_tokens
    return replace(opened(config, reader, split), cache=cache)


def _open_cache(config: StoreConfig) -> StoreCache | None:
    """The cache of a store on another machine, where the recipe has one."""
    if not (config.cache.memory_bytes or config.cache.disk_bytes):
        return None
    # Of a store on this machine too, which needs none: what cannot be is refused wherever it is said.
    check_cache(config.cache)
    folder = open_folder(config.path, config.storage)
    if folder.local_path() is not None:
        return None
    return StoreCache(folder, config.cache)


def _open_tokens(config: StoreConfig, reader: StoreReader, split: Split | None) -> StoreData:
    assert config.sequence is not None
    if config.inputs or config.target is not None or config.targets:
        raise RequestError(
            "data.sequence makes samples of token ids alone; leave it out, or data.inputs and data.target"
        )
    column = choose_tokens(reader.manifest.schema, config.tokens)
    tokens = TokenSequence(reader, column)
    if tokens.lowest < 0:
        raise RequestError(f"column {column!r} holds the id {tokens.lowest}; token ids are 0 or more")
    if config.vocab is not None and tokens.highest >= config.vocab:
        raise RequestError(
            f"column {column!r} holds the id {tokens.highest} and data.vocab is {config.vocab}; set it to "
            f"{tokens.highest + 1} or more"
        )
    vocab = config.vocab or tokens.highest + 1
    if split is not None:
        raise RequestError(
            "data.split: a split is of rows, and samples of data.sequence go over many; use data.validation and data.test"
        )
    needed = config.sequence + 1
    cut = split_positions(len(tokens), config.validation, config.test, needed=needed, what="token ids")
    train, validation, test = (RowSelection.of_range(part) for part in cut)
    spec = DataSpec(kind="tokens", vocab=vocab, sequence=config.sequence, tokens_per_sample=config.sequence)
    return StoreData(
        reader=reader,
        spec=spec,
        parts=(train, validation, test),
        inputs=(column,),
        tokens=tokens,
        follows=config.follow,
    )


def _open_rows(config: StoreConfig, reader: StoreReader, split: Split | None) -> StoreData:
    targets = config.targets or ((config.target,) if config.target is not None else ())
    if not targets:
        raise RequestError(
            f"data.target says which column is predicted, and it is not given; the columns are "
            f"{', '.join(reader.manifest.schema.names)}, and for token ids data.sequence is given instead"
        )
    parts = _cut_rows(config, reader, split)
    if is_prepared(config, reader.schema):
        made = prepare_store(config, reader, parts, shards=fit_shards())
        return StoreData(reader=reader, spec=made.columns.spec, parts=made.parts, follows=config.follow, prepared=made)
    assert not isinstance(config.inputs, dict), "named inputs are prepared"
    inputs = config.inputs or tuple(
        field.name for field in reader.schema.fields if field.name not in targets and not field.is_ragged
    )
    if not inputs:
        raise RequestError("data.inputs names no column, and beside the target there is none of numbers; name one")
    for name in (*inputs, *targets):
        _check_numbers(reader.schema[name])
    spec = _describe(reader, inputs, targets)
    return StoreData(
        reader=reader,
        spec=spec,
        parts=parts,
        inputs=inputs,
        targets=targets,
        follows=config.follow,
    )


def _cut_rows(
    config: StoreConfig, reader: StoreReader, split: Split | None
) -> tuple[RowSelection, RowSelection, RowSelection]:
    """Rows of train, validation and test."""
    if split is None:
        cut = split_positions(len(reader), config.validation, config.test, what="rows")
        train, validation, test = (RowSelection.of_range(part) for part in cut)
        return train, validation, test
    empty = RowSelection.of_range(range(0))
    train, validation, test = (split.parts.get(name, empty) for name in PARTS)
    if not len(train):
        raise RequestError(f"data.split: {split.name!r} has no row to train on")
    return train, validation, test


def _check_numbers(field: Field) -> None:
    if field.is_ragged or field.dtype.kind not in "biuf":
        raise RequestError(
            f"column {field.name!r} is {field.kind}, and a model takes numbers of one shape; leave it out of data.inputs, or "
            "make some of it in data.prepare (hash, vocabulary, ngrams, date, image)"
        )


def _describe(reader: StoreReader, inputs: Sequence[str], targets: Sequence[str]) -> DataSpec:
    stats = reader.stats()
    for name in (*inputs, *targets):
        if stats[name].missing:
            raise RequestError(
                f"column {name!r} has no value in {stats[name].missing} of {len(reader)} rows, and a model takes numbers; write "
                'a step "fill" in data.prepare, or leave the column out'
            )
    fields = [reader.schema[name] for name in inputs]
    if not all(field.dtype.kind in "iu" for field in fields):
        for field in fields:
            lowest, highest = stats[field.name].min, stats[field.name].max
            if field.dtype.kind in "iu" and lowest is not None and highest is not None:
                refuse_rounding(field, int(lowest), int(highest))
    shapes = [field.shape for field in fields]
    features = shapes[0] or (1,)
    if len(inputs) > 1:
        features = (sum(_size(shape) for shape in shapes),)
    field = reader.schema[targets[0]]
    if len(targets) == 1 and field.dtype.kind in "biu" and not field.shape:
        lowest, highest = stats[targets[0]].min, stats[targets[0]].max
        if lowest is None or highest is None or lowest < 0:
            raise RequestError(
                f"data.target: column {targets[0]!r} has the class {lowest}; classes are numbered from 0"
            )
        return DataSpec(kind="classes", features=features, classes=int(highest) + 1)
    outputs = sum(_size(reader.schema[name].shape) for name in targets)
    return DataSpec(kind="regression", features=features, outputs=outputs)


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
