"""JSON lines: one object per line, read strictly. A key that is absent is a missing value; one that nobody knows is an error."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import msgspec

from shoal.core.errors import RequestError
from shoal.data.formats.files import DataFile
from shoal.data.formats.kinds import UNKNOWN, Unfit, column_of_values, join_kinds, kind_of_value
from shoal.data.formats.lines import iter_lines
from shoal.data.formats.options import BadRow, ReadOptions
from shoal.data.table import Field, Schema, Table


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The columns of the first rows.

    Raises:
        RequestError: the file is empty, or no column can hold the values of a key.
    """
    return schema_of_rows(file.name, _head(file, options), options)


def _head(file: DataFile, options: ReadOptions) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(file, options):
        if number > options.head_rows:
            break
        try:
            yield number, parse_row(line)
        except ValueError as error:
            if not options.rejects.are_kept:
                raise BadRow(file.name, number, None, str(error)) from error


def schema_of_rows(name: str, rows: Iterable[tuple[int, dict[str, Any]]], options: ReadOptions) -> Schema:
    """The columns of some rows, given with their numbers.

    Raises:
        RequestError: there is no row, or no column can hold the values of a key.
    """
    kinds: dict[str, str] = {}
    for number, row in rows:
        for key, value in row.items():
            found = kind_of_value(value)
            joined = None if found is None else join_kinds(kinds.get(key, UNKNOWN), found)
            if joined is None and not options.rejects.are_kept:
                had = kinds.get(key, UNKNOWN) or "nothing"
                why = f"{str(value)[:60]!r} cannot stand in a column that has {had} before it"
                raise BadRow(name, number, key, why)
            kinds[key] = joined if joined is not None else kinds.get(key, UNKNOWN)
    if not kinds:
        raise RequestError(f"{name} has no row; write one JSON object per line")
    return Schema(fields=tuple(Field(name=name, kind=kind) for name, kind in kinds.items()))


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size.

    Raises:
        BadRow: a row that does not fit, where they are not kept.
    """
    known = {field.name for field in schema.fields}
    chunk: list[dict[str, Any]] = []
    numbers: list[int] = []
    size = 0
    for number, line in _lines(file, options):
        try:
            row = parse_row(line)
        except ValueError as error:
            options.rejects.add(file.name, number, None, str(error), line)
            continue
        if (unknown := unknown_key(row, known, options)) is not None:
            why = (
                f"no row of the first {options.head_rows} of the first files has this key; choose columns with: shoal data "
                "build --columns A,B"
            )
            options.rejects.add(file.name, number, unknown, why, line)
            continue
        chunk.append(row)
        numbers.append(number)
        # A list of Python numbers takes several times its text.
        size += 8 * len(line)
        if len(chunk) >= options.batch_rows or size >= options.batch_bytes:
            yield table_of_rows(file.name, schema, chunk, numbers, options)
            chunk, numbers, size = [], [], 0
    if chunk:
        yield table_of_rows(file.name, schema, chunk, numbers, options)


def unknown_key(row: dict[str, Any], known: Container[str], options: ReadOptions) -> str | None:
    """A key of a row that is no column, where all columns are read."""
    return None if options.columns is not None else next((key for key in row if key not in known), None)


def table_of_rows(
    name: str, schema: Schema, rows: list[dict[str, Any]], numbers: list[int], options: ReadOptions
) -> Table:
    """Objects of JSON as rows.

    Raises:
        BadRow: a value that does not fit, where such rows are not kept; says where by ``name`` and the row's number.
    """
    while True:
        columns = []
        bad: int | None = None
        for field in schema.fields:
            try:
                columns.append(column_of_values(field.name, [row.get(field.name) for row in rows], field.kind))
            except Unfit as unfit:
                bad = unfit.place
                options.rejects.add(name, numbers[bad], field.name, unfit.why, rows[bad])
                break
        if bad is None:
            return Table(columns=tuple(columns), num_rows=len(rows))
        rows, numbers = rows[:bad] + rows[bad + 1 :], numbers[:bad] + numbers[bad + 1 :]


def _lines(file: DataFile, options: ReadOptions) -> Iterator[tuple[int, str]]:
    number = 0
    for line in iter_lines(file, options.value_bytes):
        if line.strip():
            number += 1
            yield number, line


def parse_row(line: str | bytes) -> dict[str, Any]:
    """One object of JSON.

    Raises:
        ValueError: it is none.
    """
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row is one JSON object, and this is a {type(row).__name__}")
    return row
