"""WebDataset shards: tar files whose members share a name up to the first dot, ``0001.jpg`` and ``0001.cls`` being one row.

A column is an extension. ``.cls`` and ``.index`` are whole numbers, ``.txt`` and ``.json`` text, the rest bytes. A tar file
can ask for more than rows: links, devices, paths that leave the folder and headers of any length. Nothing is ever written
to a disk here, and all of these are refused.
"""

import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.files import DataFile
from shoal.data.formats.kinds import INTEGER, Unfit, column_of_texts
from shoal.data.formats.options import ReadOptions
from shoal.data.table import BYTES, TEXT, Column, Field, Schema, Table, text_column

KEY = "__key__"
_NUMBERS = ("cls", "cls2", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript", "json")
_MAX_NAME = 4096


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The key and the extensions of the first rows.

    Raises:
        RequestError: the shard holds something that is no row.
    """
    extensions: dict[str, None] = {}
    for number, (_, row) in enumerate(_rows(file, options)):
        extensions.update(dict.fromkeys(row))
        if number + 1 >= min(options.head_rows, 16):
            break
    if not extensions:
        raise RequestError(f"{file.name} is an empty tar file")
    fields = [Field(name=KEY, kind=TEXT), *(Field(name=name, kind=_kind(name)) for name in sorted(extensions))]
    return Schema(fields=tuple(fields))


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size.

    Raises:
        RequestError: the shard holds something that is no row.
    """
    known = set(schema.names)
    keys: list[str] = []
    rows: list[dict[str, bytes]] = []
    size = number = 0
    for key, row in _rows(file, options):
        number += 1
        unknown = [name for name in row if name not in known] if options.columns is None else []
        if unknown:
            options.rejects.add(file.name, number, unknown[0], f"the rows before {key!r} have no such member", key)
            continue
        try:
            for name in row:
                if name in known and _kind(name) == INTEGER:
                    column_of_texts(name, [row[name].decode("ascii", "replace").strip()], INTEGER, ())
        except Unfit as unfit:
            options.rejects.add(file.name, number, name, unfit.why, key)
            continue
        keys.append(key)
        rows.append(row)
        size += sum(map(len, row.values()))
        if len(rows) >= options.batch_rows or size >= options.batch_bytes:
            yield _table(schema, keys, rows)
            keys, rows, size = [], [], 0
    if rows:
        yield _table(schema, keys, rows)


def _kind(extension: str) -> str:
    last = extension.rpartition(".")[2]
    return INTEGER if last in _NUMBERS else TEXT if last in _TEXTS else BYTES


def _table(schema: Schema, keys: list[str], rows: list[dict[str, bytes]]) -> Table:
    columns = []
    for field in schema.fields:
        if field.name == KEY:
            columns.append(text_column(KEY, keys))
        elif field.kind == INTEGER:
            texts = [row[field.name].decode("ascii", "replace").strip() if field.name in row else "" for row in rows]
            columns.append(column_of_texts(field.name, texts, INTEGER, ("",)))
        else:
            columns.append(bytes_column(field, [row.get(field.name) for row in rows]))
    return Table(columns=tuple(columns), num_rows=len(rows))


def bytes_column(field: Field, values: list[bytes | None]) -> Column:
    """A column of bytes or of text that is encoded already; None is missing."""
    offsets = np.concatenate([[0], np.cumsum([len(value or b"") for value in values])]).astype(np.int64)
    flat = np.frombuffer(b"".join(value or b"" for value in values), dtype=np.uint8)
    valid = np.array([value is not None for value in values], dtype=np.bool_)
    return Column(field=field, values=flat, offsets=offsets, valid=None if valid.all() else valid)


def _rows(file: DataFile, options: ReadOptions) -> Iterator[tuple[str, dict[str, bytes]]]:
    key: str | None = None
    row: dict[str, bytes] = {}
    for name, content in _members(file, options):
        folder, slash, last = name.rpartition("/")
        stem, dot, extension = last.partition(".")
        if not dot or not stem:
            raise RequestError(f"{file.name}: member {name!r} has no extension, which says the column that it is of")
        if folder + slash + stem != key:
            if key is not None:
                yield key, row
            key, row = folder + slash + stem, {}
        if extension in row:
            raise RequestError(f"{file.name}: row {key!r} has two members of the extension {extension!r}")
        row[extension] = content
    if key is not None:
        yield key, row


def _members(file: DataFile, options: ReadOptions) -> Iterator[tuple[str, bytes]]:
    with file.open_text() as opened:
        guarded: Any = _Guarded(opened, file.name, options.value_bytes)
        try:
            with tarfile.open(fileobj=guarded, mode="r:", encoding="utf-8") as tar:
                for member in tar:
                    if member.isdir():
                        continue
                    name = member.name
                    parts = name.split("/")
                    if not member.isreg() or member.issparse():
                        raise RequestError(
                            f"{file.name}: member {name[:200]!r} is no plain file (a link, a device or sparse); refused"
                        )
                    if name.startswith("/") or ".." in parts or "\0" in name or len(name) > _MAX_NAME:
                        raise RequestError(f"{file.name}: member {name[:200]!r} leaves the folder; refused")
                    if member.size > options.value_bytes:
                        raise RequestError(
                            f"{file.name}: member {name[:200]!r} says {format_bytes(member.size)}, and a value has at most "
                            f"{format_bytes(options.value_bytes)}"
                        )
                    taken = tar.extractfile(member)
                    content = b"" if taken is None else taken.read()
                    if len(content) != member.size:
                        raise RequestError(f"{file.name}: member {name[:200]!r} ends too early; the file is torn")
                    yield name.removeprefix("./"), content
                    tar.members = []  # type: ignore[attr-defined]  # It keeps every header that it has seen.
        except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
            raise RequestError(f"{file.name} is no whole tar file: {error}; write it again") from error


class _Guarded:
    """Refuses reads that only a header of absurd length asks for."""

    def __init__(self, opened: Any, name: str, most: int) -> None:
        self._opened, self._name, self._most = opened, name, most

    def read(self, size: int) -> bytes:
        if not 0 <= size <= max(self._most, 1 << 20):
            raise RequestError(f"{self._name}: a header says {format_bytes(size)}; refused")
        found: bytes = self._opened.read(size)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of the file."""
        place: int = self._opened.seek(offset, whence)
        return place

    def tell(self) -> int:
        """As of the file."""
        place: int = self._opened.tell()
        return place
