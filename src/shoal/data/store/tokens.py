"""A column of token ids as one long sequence over all blocks, of which windows are read.

A row is one id, or a document (a list of ids); documents lie behind one another. A window within one block is a view of it, and
all such windows of a block are taken at once; only one that begins in one block and ends in another is put together by pieces.
"""

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, did_you_mean
from shoal.data.store.reader import StoreReader
from shoal.data.table import LIST, Field, Schema

Ids = NDArray[np.int64]


def token_columns(schema: Schema) -> list[str]:
    """The columns that can be token ids."""
    return [field.name for field in schema.fields if _is_tokens(field)]


def _is_tokens(field: Field) -> bool:
    is_whole = field.dtype.kind in "iu"
    return is_whole and not field.shape and (not field.is_ragged or field.kind.startswith(LIST))


def choose_tokens(schema: Schema, name: str | None) -> str:
    """The column of token ids.

    Raises:
        RequestError: there is none, there are several and none is named, or the named one is none.
    """
    found = token_columns(schema)
    if name is not None and name in found:
        return name
    if name is not None:
        schema[name]
        raise RequestError(
            f"data.tokens: column {name!r} is not whole numbers, one or a list a row; {did_you_mean(name, found)}"
        )
    if len(found) != 1:
        said = f"the columns {', '.join(found)} all could be" if found else f"none of {', '.join(schema.names)} is"
        raise RequestError(f"{said} a sequence of token ids; name one with data.tokens, or leave data.sequence out")
    return found[0]


class TokenSequence:
    """The ids of a column, by their places in the whole sequence.

    Args:
        reader: of the store.
        column: of the ids.

    Raises:
        RequestError: ids are missing.
    """

    def __init__(self, reader: StoreReader, column: str) -> None:
        self._reader = reader
        self._place = reader.manifest.schema.names.index(column)
        field = reader.manifest.schema[column]
        stats = [reader.block_stats(number)[column] for number in range(reader.num_blocks)]
        missing = sum(one.missing for one in stats)
        if missing:
            raise RequestError(
                f"column {column!r} has {missing} rows without a value, and token ids have none such; leave them out"
            )
        counts = (
            np.array([one.elements for one in stats], dtype=np.int64)
            if field.is_ragged
            else np.diff(reader.block_starts)
        )
        self.starts: Ids = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        """(blocks + 1,): the first id of each block, and the number of ids behind the last."""
        self.dtype = field.dtype
        self.lowest = int(min((one.min for one in stats if one.min is not None), default=0))
        self.highest = int(max((one.max for one in stats if one.max is not None), default=0))

    def __len__(self) -> int:
        """Number of ids."""
        return int(self.starts[-1])

    def windows(self, starts: Ids, length: int) -> NDArray[np.int64]:
        """The ids from each of these places on: (windows, length).

        Raises:
            BrokenFile: a block is gone, torn or altered.
        """
        found = np.empty((len(starts), length), dtype=np.int64)
        first = np.searchsorted(self.starts, starts, side="right") - 1
        last = np.searchsorted(self.starts, starts + (length - 1), side="right") - 1
        order = np.argsort(first, kind="stable")
        cuts = (np.flatnonzero(np.diff(first[order])) + 1).tolist()
        for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True):
            group = order[begin:end]
            if not len(group):
                continue
            number = int(first[group[0]])
            inside = group[last[group] == number]
            if len(inside):
                self._copy_inside(found, inside, starts[inside] - self.starts[number], number, length)
            for place in group[last[group] != number].tolist():
                found[place] = self._piece_together(int(starts[place]), length, number)
        return found

    def _copy_inside(self, found: NDArray[np.int64], places: Ids, offsets: Ids, number: int, length: int) -> None:
        values = self._values(number)
        if len(places) == 1:
            start = int(offsets[0])
            found[places[0]] = values[start : start + length]
            return
        size = values.itemsize
        views: NDArray[np.int64] = np.ndarray(
            (len(values) - length + 1, length), values.dtype, values, strides=(size, size)
        )
        found[places] = views[offsets]

    def _piece_together(self, start: int, length: int, number: int) -> NDArray[np.int64]:
        pieces, left, at = [], length, start - int(self.starts[number])
        while left:
            values = self._values(number)[at : at + left]
            pieces.append(values)
            left -= len(values)
            number, at = number + 1, 0
        return np.concatenate(pieces)

    def _values(self, number: int) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self._reader.blocks.table(number).columns[self._place].values
        if len(values) != self.starts[number + 1] - self.starts[number]:
            raise RequestError(
                f"block {number} has {len(values)} ids and its statistics say otherwise; see shoal data verify"
            )
        return values
