"""CSV files, strictly: a row of another length, or a field that is no value of its column, is an error or goes to the rejects.

The standard library's reader splits rows: pyarrow's fills short rows up in some settings, reads ``1_000`` or hexadecimal
numbers in others, and says where a value is wrong only while it reads with one thread.
"""

import csv
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import RequestError
from shoal.data.formats.files import DataFile
from shoal.data.formats.kinds import Unfit, column_of_texts, guess_kind
from shoal.data.formats.lines import iter_lines
from shoal.data.formats.options import ReadOptions
from shoal.data.table import Field, Schema, Table


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The columns by the first line, their kinds by the first rows.

    Raises:
        RequestError: the file is empty, has no header or two columns of one name.
    """
    rows = _rows(file, options)
    names = _columns(file, rows, options)
    head: list[list[str]] = []
    for _, row in rows:
        if len(row) == len(names):
            head.append(row)
        if len(head) == options.head_rows:
            break
    kinds = [guess_kind((row[place] for row in head), options.missing) for place in range(len(names))]
    return Schema(fields=tuple(Field(name=name, kind=kind) for name, kind in zip(names, kinds, strict=True)))


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size.

    Raises:
        BadRow: a row that does not fit, where they are not kept.
    """
    rows = _rows(file, options)
    names = _columns(file, rows, options)
    places = [names.index(field.name) for field in schema.fields]
    chunk: list[list[str]] = []
    numbers: list[int] = []
    size = 0
    for number, row in rows:
        if len(row) != len(names):
            what = "table" if options.header else "header"
            why = f"the row has {len(row)} fields and the {what} {len(names)}"
            options.rejects.add(file.name, number, None, why, row)
            continue
        chunk.append(row)
        numbers.append(number)
        size += sum(map(len, row)) + 64 * len(row)
        if len(chunk) >= options.batch_rows or size >= options.batch_bytes:
            yield _table(file, schema, places, chunk, numbers, options)
            chunk, numbers, size = [], [], 0
    if chunk:
        yield _table(file, schema, places, chunk, numbers, options)


def _table(
    file: DataFile, schema: Schema, places: list[int], rows: list[list[str]], numbers: list[int], options: ReadOptions
) -> Table:
    while True:
        columns = []
        bad: int | None = None
        for field, place in zip(schema.fields, places, strict=True):
            texts = [row[place] for row in rows]
            try:
                columns.append(column_of_texts(field.name, texts, field.kind, options.missing))
            except Unfit as unfit:
                bad = unfit.place
                options.rejects.add(file.name, numbers[bad], field.name, unfit.why, rows[bad])
                break
        if bad is None:
            return Table(columns=tuple(columns), num_rows=len(rows))
        rows, numbers = rows[:bad] + rows[bad + 1 :], numbers[:bad] + numbers[bad + 1 :]


def _rows(file: DataFile, options: ReadOptions) -> Iterator[tuple[int, list[str]]]:
    """Number of the row (the header is 0) and its fields; empty lines are none."""
    delimiter = options.delimiter or ("\t" if ".tsv" in file.suffixes else ",")
    quoting: dict[str, Any] = {} if options.quotes else {"quoting": csv.QUOTE_NONE}
    reader = csv.reader(iter_lines(file, options.value_bytes), delimiter=delimiter, strict=True, **quoting)
    number = 0
    try:
        for row in reader:
            if row:
                yield number, row
                number += 1
    except csv.Error as error:
        raise RequestError(
            f"{file.name}, row {number} (line {reader.line_num}): {error}; is a quote left open, or data.delimiter not "
            f"{delimiter!r}?"
        ) from error


def _columns(file: DataFile, rows: Iterator[tuple[int, list[str]]], options: ReadOptions) -> list[str]:
    """The names of the columns; what is left of ``rows`` are rows."""
    if not options.header:
        return _header(file, next(rows, (1, []))[1])
    for _ in range(options.skip_lines):
        next(rows, None)
    return list(options.header)


def _header(file: DataFile, names: list[str]) -> list[str]:
    if not names:
        raise RequestError(f"{file.name} is empty; its first line must name the columns")
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise RequestError(f"{file.name} has two columns of the name {double[0]!r}; give each a name of its own")
    return names
