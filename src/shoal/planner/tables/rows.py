"""The rows of a CSV file with the lines that they begin on: whether a file is a table of runs at all, before any cell is read.

``csv.DictReader`` would fill up a row that is too short and drop the end of one that is too long. In both a comma is missing or
one too many, and from there on every number stands under another column's name.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shoal.core.errors import RequestError, nearest

_MOST_ROWS = 100_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, as it is written."""

    number: int
    """Counted from 0, without the header."""
    line: int
    """Of the file, counted from 1, on which it begins: cells in quotes may go over several."""
    cells: dict[str, str]
    """By column; what a short row lacks is empty."""
    problem: str = ""
    """Why its cells cannot be told apart, where that is so."""


def read_rows(path: Path, *, needed: Sequence[str], optional: Sequence[str]) -> list[Row]:
    """Every row of a CSV file; empty lines are none.

    Args:
        path: the file.
        needed: columns that it must have.
        optional: columns that it may have, and rows may leave out at their end.

    Raises:
        RequestError: there is no such file, it is no CSV file, a needed column is missing or there twice, or there are no rows.
    """
    try:
        # Spreadsheets put a mark in front of UTF-8.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_rows(path, file, needed, optional))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a CSV file that is there") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a CSV file in UTF-8: {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise RequestError(f"{path} is not a CSV file: {error}; see that every quote is closed") from error
    if not rows:
        raise RequestError(f"{path} has no rows; give a table with at least one run")
    return rows


def _rows(path: Path, file: TextIO, needed: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(file)
    header = next((cells for cells in reader if cells), None)
    if header is None:
        raise RequestError(f"{path} is empty; a table of runs begins with a line of columns: {', '.join(needed)}")
    _check_header(path, header, needed, optional)
    number, line = 0, reader.line_num + 1
    for cells in reader:
        # A spreadsheet writes an empty line as commas alone.
        if any(cell.strip() for cell in cells):
            if number == _MOST_ROWS:
                raise RequestError(f"{path} has more than {_MOST_ROWS:,} rows; give it in parts")
            filled = [*cells, *[""] * (len(header) - len(cells))]
            known = dict(zip(header, filled, strict=False))
            yield Row(number=number, line=line, cells=known, problem=_misfit(header, cells, optional))
            number += 1
        line = reader.line_num + 1


def _check_header(path: Path, header: Sequence[str], needed: Sequence[str], optional: Sequence[str]) -> None:
    missing = [column for column in needed if column not in header]
    separator = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
    if missing and separator is not None:
        raise RequestError(
            f"{path} has its columns separated by {separator!r}, and a table of runs has commas; save it with commas between them"
        )
    if missing:
        others = [column for column in header if column not in needed]
        lowered = {other.strip().lower(): other for other in others}
        close = {column: lowered.get(nearest(column, lowered) or "") for column in missing}
        renames = ", ".join(f"{found!r} to {column!r}" for column, found in close.items() if found)
        fix = f"rename {renames}; " if renames else ""
        raise RequestError(
            f"{path} has {len(header)} columns, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not among them; "
            f"{fix}a table of runs has {', '.join(needed)}"
        )
    twice = next((column for column in (*needed, *optional) if header.count(column) > 1), None)
    if twice is not None:
        raise RequestError(f"{path} has the column {twice} {header.count(twice)} times; keep one of them")


def _misfit(header: Sequence[str], cells: Sequence[str], optional: Sequence[str]) -> str:
    """What is wrong with the number of cells; empty ones at the end, and notes that were left out, move nothing."""
    absent = [column for column in header[len(cells) :] if column not in optional]
    extra = [cell for cell in cells[len(header) :] if cell.strip()]
    if absent:
        return f"it has {len(cells)} cells and the header has {len(header)}: {absent[0]} and what follows is missing; give all"
    if extra:
        return (
            f"it has {len(cells)} cells and the header has {len(header)}: {extra[0]!r} is under no column; remove it, or put a "
            f"cell that has a comma in quotes"
        )
    return ""
