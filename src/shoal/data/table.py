"""Rows of named columns in memory: what readers of formats make, what the store keeps, what transforms change.

A column is plain numpy: one array for values of a fixed shape, or flat elements with offsets for values of many lengths (text,
bytes, lists). Whether a value is missing is a mask of its own and never NaN, because NaN is a number that a sensor may well have
measured, and a mean that skips one and not the other must be able to tell them apart. pyarrow has richer tables and is 55 MB;
only those who read its formats need it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, did_you_mean

TEXT = "text"
BYTES = "bytes"
LIST = "list:"
"""Kinds of values with many lengths; a list names the dtype of its elements, ``list:<i4``."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One column's name and type."""

    name: str
    kind: str
    """A numpy dtype such as ``<f4``, or ``text``, ``bytes``, ``list:<i4``."""
    shape: tuple[int, ...] = ()
    """Of one value; values of many lengths have none."""

    @property
    def is_ragged(self) -> bool:
        """True where values have many lengths."""
        return self.kind in (TEXT, BYTES) or self.kind.startswith(LIST)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements; text is kept as its UTF-8 bytes."""
        if self.kind in (TEXT, BYTES):
            return np.dtype(np.uint8)
        return np.dtype(self.kind.removeprefix(LIST))


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a table, in order."""

    fields: tuple[Field, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""
        return tuple(field.name for field in self.fields)

    def __getitem__(self, name: str) -> Field:
        """The column of this name.

        Raises:
            RequestError: there is none; the nearest names are in the message.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise RequestError(f"there is no column {name!r}; {did_you_mean(name, self.names)}")


@dataclass(frozen=True, kw_only=True)
class Column:
    """The values of one column."""

    field: Field
    values: NDArray[Any]
    """(rows, *shape), or the flat elements of all rows where values have many lengths."""
    offsets: NDArray[np.int64] | None = None
    """(rows + 1,): where each row's elements begin and end."""
    valid: NDArray[np.bool_] | None = None
    """(rows,): False where the value is missing; None where none is."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def slice(self, start: int, stop: int) -> "Column":
        """Rows next to one another, without a copy."""
        valid = None if self.valid is None else self.valid[start:stop]
        if self.offsets is None:
            return Column(field=self.field, values=self.values[start:stop], valid=valid)
        offsets = self.offsets[start : stop + 1]
        values = self.values[offsets[0] : offsets[-1]]
        return Column(field=self.field, values=values, offsets=offsets - offsets[0], valid=valid)

    def take(self, rows: NDArray[np.int64]) -> "Column":
        """These rows, in this order."""
        valid = None if self.valid is None else self.valid[rows]
        if self.offsets is None:
            return Column(field=self.field, values=self.values[rows], valid=valid)
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Column(field=self.field, values=self.values[places], offsets=offsets, valid=valid)

    def value(self, row: int) -> Any:
        """One row's value as Python has it: a number, text, bytes or an array; None where it is missing."""
        if self.valid is not None and not self.valid[row]:
            return None
        if self.offsets is None:
            found = self.values[row]
            return found if self.field.shape else found.item()
        found = self.values[self.offsets[row] : self.offsets[row + 1]]
        if self.field.kind == TEXT:
            return found.tobytes().decode()
        return found.tobytes() if self.field.kind == BYTES else found


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of equal length."""

    columns: tuple[Column, ...]
    num_rows: int

    @classmethod
    def of(cls, columns: Iterable[Column]) -> "Table":
        """A table of these columns, at least one."""
        found = tuple(columns)
        lengths = {len(column) for column in found}
        assert len(lengths) == 1, f"columns of {sorted(lengths)} rows"
        return cls(columns=found, num_rows=lengths.pop())

    def __len__(self) -> int:
        """Number of rows."""
        return self.num_rows

    @property
    def schema(self) -> Schema:
        """The columns' names and types."""
        return Schema(fields=tuple(column.field for column in self.columns))

    def __getitem__(self, name: str) -> Column:
        """The column of this name.

        Raises:
            RequestError: there is none; the nearest names are in the message.
        """
        return self.columns[self.schema.names.index(self.schema[name].name)]

    def slice(self, start: int, stop: int) -> "Table":
        """Rows next to one another, without a copy."""
        columns = tuple(column.slice(start, stop) for column in self.columns)
        return Table(columns=columns, num_rows=max(0, min(stop, self.num_rows) - start))

    def take(self, rows: NDArray[np.int64]) -> "Table":
        """These rows, in this order."""
        return Table(columns=tuple(column.take(rows) for column in self.columns), num_rows=len(rows))

    def replace(self, columns: Mapping[str, Column]) -> "Table":
        """The table with these columns in place of those of their names, or behind the others."""
        kept = tuple(columns.get(column.field.name, column) for column in self.columns)
        added = tuple(column for name, column in columns.items() if name not in self.schema.names)
        return Table(columns=(*kept, *added), num_rows=self.num_rows)


class RowSet(Protocol):
    """Rows that can be read in any order by their numbers: a table in memory, a store, a file with row groups."""

    @property
    def schema(self) -> Schema:
        """The columns' names and types."""

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, rows: NDArray[np.int64]) -> Table:
        """These rows, in this order."""


def concat_columns(parts: Sequence[Column]) -> Column:
    """The rows of all parts behind one another; the parts have one field."""
    field = parts[0].field
    valid = None
    if any(part.valid is not None for part in parts):
        valid = np.concatenate([np.ones(len(part), np.bool_) if part.valid is None else part.valid for part in parts])
    values = np.concatenate([part.values for part in parts])
    if not field.is_ragged:
        return Column(field=field, values=values, valid=valid)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Column(field=field, values=values, offsets=offsets, valid=valid)


def concat_tables(parts: Sequence[Table]) -> Table:
    """The rows of all parts behind one another; the parts have one schema."""
    columns = [concat_columns([part.columns[place] for part in parts]) for place in range(len(parts[0].columns))]
    return Table(columns=tuple(columns), num_rows=sum(len(part) for part in parts))


def text_column(name: str, values: Sequence[str | None]) -> Column:
    """A column of text; None is missing."""
    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in encoded])]).astype(np.int64)
    flat = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    valid = np.array([value is not None for value in values], dtype=np.bool_)
    return Column(field=Field(name=name, kind=TEXT), values=flat, offsets=offsets, valid=None if valid.all() else valid)


def number_column(name: str, values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> Column:
    """A column of numbers of one shape."""
    field = Field(name=name, kind=values.dtype.str, shape=tuple(values.shape[1:]))
    return Column(field=field, values=values, valid=valid)
