"""From an address to a schema and tables: the format guessed, the schemas of all files joined, and the rows in one order.

Schemas are looked at in every file before the first row is handed out: a column that changes in the last of a thousand shards is
told at once, with the names of two files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.core.errors import RequestError, did_you_mean
from shoal.data.formats import (
    arrowfiles,
    csvlines,
    imagefolders,
    jsonlines,
    mdsshards,
    parquet,
    tarshards,
    textlines,
    tokenfiles,
)
from shoal.data.formats.files import DataFile, cache_files, find_files, prune
from shoal.data.formats.hivetables import hive_files, hive_options
from shoal.data.formats.kinds import FLOAT, UNKNOWN, Unfit, column_of_texts, guess_kind, join_kinds, read_kind
from shoal.data.formats.options import ReadOptions
from shoal.data.storage.hive import resolve_hive
from shoal.data.table import Column, Field, Schema, Table
from shoal.data.tiers.cache import BlockCache


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one format is read."""

    suffixes: tuple[str, ...]
    read_schema: Callable[[DataFile, ReadOptions], Schema]
    read_tables: Callable[[DataFile, Schema, ReadOptions], Iterator[Table]]
    is_guessing: bool = False
    """True where types are found by a look at rows, so that whole numbers in one file and others in the next are no change."""


FORMATS = {
    "csv": Format(
        suffixes=(".csv", ".tsv"), read_schema=csvlines.read_schema, read_tables=csvlines.read_tables, is_guessing=True
    ),
    "jsonl": Format(
        suffixes=(".jsonl", ".ndjson"),
        read_schema=jsonlines.read_schema,
        read_tables=jsonlines.read_tables,
        is_guessing=True,
    ),
    "parquet": Format(suffixes=(".parquet", ".pq"), read_schema=parquet.read_schema, read_tables=parquet.read_tables),
    "arrow": Format(suffixes=(".arrow",), read_schema=arrowfiles.read_schema, read_tables=arrowfiles.read_tables),
    "webdataset": Format(suffixes=(".tar",), read_schema=tarshards.read_schema, read_tables=tarshards.read_tables),
    "mds": Format(suffixes=mdsshards.SUFFIXES, read_schema=mdsshards.read_schema, read_tables=mdsshards.read_tables),
    "images": Format(
        suffixes=imagefolders.SUFFIXES, read_schema=imagefolders.read_schema, read_tables=imagefolders.read_tables
    ),
    "text": Format(suffixes=(".txt",), read_schema=textlines.read_schema, read_tables=textlines.read_tables),
    "tokens": Format(suffixes=(".npy", ".bin"), read_schema=tokenfiles.read_schema, read_tables=tokenfiles.read_tables),
}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Files whose schemas agree."""

    format: str
    files: tuple[DataFile, ...]
    schema: Schema
    options: ReadOptions
    cache: BlockCache | None = None
    """What the files are read through; None where nothing is kept near."""

    @property
    def num_bytes(self) -> int:
        """Of all files, as they lie."""
        return sum(file.num_bytes for file in self.files)

    def tables(self) -> Iterator[Table]:
        """All rows, in the order of the files.

        Raises:
            RequestError: a file is torn, or a row does not fit.
        """
        with self.options.rejects:
            if self.format == "images":
                own = self._without_keys()
                for table in imagefolders.read_all(self.files, self.options):
                    yield Table(columns=tuple(table[field.name] for field in own.fields), num_rows=table.num_rows)
                return
            for file in self.files:
                for table in FORMATS[self.format].read_tables(file, self._without_keys(), self.options):
                    yield self._with_keys(table, file)

    def _key_names(self) -> tuple[str, ...]:
        return tuple(self.files[0].keys) if self.format != "images" else ()

    def _without_keys(self) -> Schema:
        keys = self._key_names()
        return Schema(fields=tuple(field for field in self.schema.fields if field.name not in keys))

    def _with_keys(self, table: Table, file: DataFile) -> Table:
        columns = {column.field.name: column for column in table.columns}
        for name in self._key_names():
            if name in self.schema.names:
                columns[name] = _key_column(self.schema[name], file.keys[name], table.num_rows)
        return Table(columns=tuple(columns[field.name] for field in self.schema.fields), num_rows=table.num_rows)


def open_data(
    address: str,
    *,
    format: str | None = None,
    pattern: str | None = None,
    where: dict[str, tuple[str, ...]] | None = None,
    options: ReadOptions | None = None,
) -> Opened:
    """The files behind an address, with one schema.

    Args:
        address: a file, a folder or a pattern, see ``find_files``; or a table of a Hive metastore.
        format: one of ``FORMATS``; guessed by the names of the files when left out.
        pattern: which files of a folder.
        where: values of ``key=value`` folders; the others are not opened.
        options: how they are read.

    Raises:
        RequestError: there is no file, the format is unknown, or two files disagree on a column; names both and the column.
    """
    options = options or ReadOptions()
    if address.startswith("hive://"):
        table = resolve_hive(address, options.storage)
        format, options = hive_options(table, address, options)
        found = hive_files(table, address, options, pattern)
    else:
        found = find_files(address, pattern, options.storage)
    return open_files(found, format=format, where=where, options=options, is_all=pattern is None)


def open_files(
    found: Sequence[DataFile],
    *,
    format: str | None = None,
    where: dict[str, tuple[str, ...]] | None = None,
    options: ReadOptions | None = None,
    is_all: bool = False,
) -> Opened:
    """Files that were found, with one schema.

    Args:
        found: the files.
        format: one of ``FORMATS``; guessed by the names of the files when left out.
        where: values of ``key=value`` folders; the others are not opened.
        options: how they are read.
        is_all: they are all that is in a folder, so that some may be something else.

    Raises:
        RequestError: as ``open_data``.
    """
    options = options or ReadOptions()
    found, cache = cache_files(found, options.cache)
    chosen = format or guess_format(found)
    if chosen not in FORMATS:
        raise RequestError(f"data.format: there is no {chosen!r}; {did_you_mean(chosen, FORMATS)}")
    listed = found
    if is_all and len(found) > 1:
        # Whatever lies beside the data: a README, a state.json.
        suffixes = FORMATS[chosen].suffixes
        found = [file for file in found if any(one in suffixes for one in file.suffixes[-2:])] or found
    if chosen == "mds" and is_all:
        mdsshards.check_index(list(listed), list(found))
    files = prune(list(found), where or {})
    schema = _join_schemas(files, chosen, options)
    return Opened(format=chosen, files=tuple(files), schema=schema, options=options, cache=cache)


def open_tables(
    address: str, format: str | None = None, options: ReadOptions | None = None
) -> tuple[Schema, Iterator[Table]]:
    """The schema of the files behind an address, and their rows in tables of bounded size; see ``open_data``."""
    opened = open_data(address, format=format, options=options)
    return opened.schema, opened.tables()


def guess_format(files: Sequence[DataFile]) -> str:
    """By the names of the files.

    Raises:
        RequestError: they say nothing, or different things.
    """
    found: dict[str, str] = {}
    for file in files:
        suffixes = file.suffixes[-2:] if file.suffixes[-1:] == [".gz"] else file.suffixes[-1:]
        for name, known in FORMATS.items():
            if any(suffix in known.suffixes for suffix in suffixes):
                found.setdefault(name, file.name)
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise RequestError(f"the name of {files[0].name} says no format; say data.format, one of {', '.join(FORMATS)}")
    (one, first), (other, second) = list(found.items())[:2]
    raise RequestError(f"{first} is {one} and {second} is {other}; say data.format, or choose files with data.pattern")


def _join_schemas(files: Sequence[DataFile], format: str, options: ReadOptions) -> Schema:
    reader = FORMATS[format]
    looked = files[:1] if format == "images" else files
    schemas = [reader.read_schema(file, options) for file in looked]
    joined = {field.name: field for field in schemas[0].fields}
    origin = dict.fromkeys(joined, looked[0].name)
    for file, schema in zip(looked[1:], schemas[1:], strict=True):
        _join_one(
            joined, origin, schema, file, reader.is_guessing, options, is_optional=format in ("jsonl", "webdataset")
        )
    keys = {} if format == "images" else _key_fields(files)
    for name, field in keys.items():
        if name in joined:
            raise RequestError(
                f"{files[0].name}: {name!r} is a key of the folders and a column of the file; rename one of them"
            )
        joined[name] = field
    if options.like is not None and reader.is_guessing:
        wanted = {name: field for name, field in joined.items() if options.wants(name)}
        return _as_wanted(options.like, wanted, files[0].name, is_optional=format == "jsonl")
    for name in options.types:
        if name not in joined:
            raise RequestError(f"data.types: {files[0].name} has no column {name!r}; {did_you_mean(name, joined)}")
    fields = []
    for name in options.columns if options.columns is not None else joined:
        if name not in joined:
            raise RequestError(f"{files[0].name} has no column {name!r}; {did_you_mean(name, joined)}")
        fields.append(_settled(joined[name], options, is_guessing=reader.is_guessing or name in keys))
    return Schema(fields=tuple(fields))


def _as_wanted(like: Schema, joined: Mapping[str, Field], file: str, *, is_optional: bool) -> Schema:
    """The columns of a store that rows are appended to, where the files have the same names."""
    new = [name for name in joined if name not in like.names]
    gone = [name for name in like.names if name not in joined and not is_optional]
    if new or gone:
        name = (gone or new)[0]
        has, lacks = (file, "the store") if new and not gone else ("the store", file)
        raise RequestError(
            f"column {name!r} is in {has} and not in {lacks}; an append has the columns of the store: {', '.join(like.names)}"
        )
    return like


def _join_one(
    joined: dict[str, Field],
    origin: dict[str, str],
    schema: Schema,
    file: DataFile,
    is_guessing: bool,
    options: ReadOptions,
    *,
    is_optional: bool,
) -> None:
    names = {field.name for field in schema.fields}
    gone = [name for name in joined if name not in names and options.wants(name)]
    new = [name for name in names if name not in joined and options.wants(name)]
    if (gone or new) and not is_optional:
        name = sorted(gone or new)[0]
        has, lacks = (origin[name], file.name) if gone else (file.name, next(iter(origin.values())))
        raise RequestError(
            f"the schema changed between shards: column {name!r} is in {has} and not in {lacks}; write it to both, or "
            "build a store of those that all files have: shoal data build --columns A,B"
        )
    for field in filter(lambda field: options.wants(field.name), schema.fields):
        had = joined.get(field.name)
        kind = field.kind if had is None else join_kinds(had.kind, field.kind)
        is_narrow = had is not None and {had.kind, field.kind} == {"<i8", "<f8"} and not is_guessing
        if (
            kind is None
            or is_narrow
            or (had is not None and had.shape != field.shape and UNKNOWN not in (had.kind, field.kind))
        ):
            assert had is not None
            raise RequestError(
                f"the schema changed between shards: column {field.name!r} is {_say(had)} in {origin[field.name]} and "
                f"{_say(field)} in "
                f"{file.name}; write both alike" + (", or say its type in data.types" if is_guessing else "")
            )
        if had is None or had.kind == UNKNOWN:
            origin[field.name] = file.name
        joined[field.name] = replace(field if had is None or had.kind == UNKNOWN else had, kind=kind)


def _say(field: Field) -> str:
    return f"{field.kind.removeprefix('<')}{list(field.shape) if field.shape else ''}"


def _settled(field: Field, options: ReadOptions, *, is_guessing: bool) -> Field:
    if field.name in options.types:
        kind = read_kind(options.types[field.name], column=field.name)
        if not is_guessing and kind != field.kind:
            raise RequestError(
                f"data.types: column {field.name!r} is {field.kind} in the files, which say their types themselves; leave it out"
            )
        return replace(field, kind=kind)
    return replace(field, kind=FLOAT) if field.kind == UNKNOWN else field


def _key_fields(files: Sequence[DataFile]) -> dict[str, Field]:
    names = tuple(files[0].keys)
    for file in files:
        if tuple(file.keys) != names:
            raise RequestError(
                f"{files[0].name} is in folders with the keys {', '.join(names) or 'none'}, and {file.name} with "
                f"{', '.join(file.keys) or 'none'}; sort all files by the same keys"
            )
    kinds = {name: guess_kind((file.keys[name] or "" for file in files), ("",)) for name in names}
    return {name: Field(name=name, kind=kind) for name, kind in kinds.items()}


def _key_column(field: Field, value: str | None, num_rows: int) -> Column:
    try:
        one = column_of_texts(field.name, [value or ""], field.kind, () if value is not None else ("",))
    except Unfit as unfit:
        raise RequestError(f"key {field.name!r} of a folder: {unfit.why}; say its type in data.types") from unfit
    return one.take(np.zeros(num_rows, dtype=np.int64))
