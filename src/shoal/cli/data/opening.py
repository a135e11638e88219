"""What the verbs of ``shoal data`` read: files, or a store."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.data.store.folder import StoreFolder
    from shoal.data.table import Schema, Table


@dataclass(frozen=True, kw_only=True)
class Given:
    """Rows that a verb was given."""

    schema: "Schema"
    tables: Callable[[], "Iterable[Table]"]
    """Reads them, a batch at a time."""
    format: str
    files: int
    """Of which they were read; of a store, its blocks."""
    what: str
    """The files, for people."""
    store: "StoreFolder | None" = None
    version: int | None = None
    """Of the store."""


def open_given(source: str, *, format: str | None, types: Sequence[str], columns: Sequence[str] | None = None) -> Given:
    """The rows at an address.

    Args:
        source: files, or a store.
        format: of the files; by their names when left out.
        types: of columns, as COLUMN=TYPE.
        columns: those that are read; all when left out, or where one of them is not there.

    Raises:
        RequestError: there is no such data, or its files have different columns.
    """
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.data.formats.opening import open_data
    from shoal.data.formats.options import ReadOptions
    from shoal.data.store.folder import is_store
    from shoal.data.store.reader import open_store

    if format is None and "*" not in source and is_store(source):
        if types:
            raise RequestError(f"{source} is a store, whose columns have their types already; leave --type out")
        reader = open_store(source)
        if columns is not None and set(columns) <= set(reader.schema.names):
            reader = open_store(source, version=reader.version, columns=columns)
        return Given(
            schema=reader.schema,
            tables=reader.tables,
            format="store",
            files=reader.num_blocks,
            what=f"{reader.num_blocks} blocks of version {reader.version}",
            store=reader.folder,
            version=reader.version,
        )
    kinds = read_types(types)
    opened = open_data(source, format=format, options=ReadOptions(types=kinds))
    if columns and set(columns) <= set(opened.schema.names):
        opened = open_data(source, format=format, options=ReadOptions(types=kinds, columns=tuple(columns)))
    return Given(
        schema=opened.schema,
        tables=opened.tables,
        format=opened.format,
        files=len(opened.files),
        what=f"{len(opened.files)} {opened.format} file(s)",
    )


def read_types(said: Sequence[str]) -> dict[str, str]:
    """Types by their columns, out of COLUMN=TYPE.

    Raises:
        RequestError: one of them is none.
    """
    found = {}
    for one in said:
        name, equals, kind = one.rpartition("=")
        if not (name and equals and kind):
            raise RequestError(f"--type {one} is no COLUMN=TYPE; write it like --type seen=time")
        found[name] = kind
    return found
