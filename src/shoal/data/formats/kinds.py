"""From texts and Python values to columns: what kind they are, and the first one that does not fit."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.table import BYTES, LIST, TEXT, Column, Field, text_column

UNKNOWN = ""
"""The kind of a column of which only missing values were seen."""
TIME = "<M8[us]"
INTEGER, FLOAT, BOOL = "<i8", "<f8", "|b1"
_NAMED = {"text": TEXT, "bytes": BYTES, "bool": BOOL, "time": TIME, "int": INTEGER, "float": FLOAT}
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_REAL = re.compile(
    r"\s*[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|nan|inf(?:inity)?)\s*",
    re.ASCII | re.I,
)
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?)?Z?", re.ASCII)
_LARGEST = float(np.finfo(np.float64).max)
_TRUTHS = {"true": True, "false": False, "True": True, "False": False, "TRUE": True, "FALSE": False}


def read_kind(text: str, *, column: str) -> str:
    """A kind as people write it: ``f4``, ``int``, ``text``, ``time``, ``list:i4``.

    Raises:
        RequestError: there is no such kind.
    """
    if text in _NAMED:
        return _NAMED[text]
    inner = text.removeprefix(LIST)
    if inner in ("bool", "int", "float", "time"):
        return LIST + _NAMED[inner]
    if re.fullmatch(r"[<|]?(?:[iu][1248]|f[248]|b1)", inner) or re.fullmatch(r"<M8\[(?:D|s|ms|us|ns)\]", inner):
        kind = np.dtype(inner).newbyteorder("<").str
        return LIST + kind if text.startswith(LIST) else kind
    raise RequestError(
        f"data.types: column {column!r} has the type {text!r}, and there is none; write bool, int, float, i1 to i8, u1 "
        f"to u8, f2 to "
        "f8, text, bytes, time, or list: before one of the numbers"
    )


def guess_kind(texts: Iterable[str], missing: Sequence[str]) -> str:
    """The narrowest kind that all texts have: whole numbers, numbers, truth values, times, else text."""
    seen = [text for text in texts if text not in missing]
    if not seen:
        return UNKNOWN
    if all(_WHOLE.fullmatch(text) for text in seen):
        return INTEGER if all(-(2**63) <= int(text) < 2**63 for text in seen) else FLOAT
    if all(_REAL.fullmatch(text) for text in seen):
        return FLOAT
    if all(text in _TRUTHS for text in seen):
        return BOOL
    return TIME if all(_TIME.fullmatch(text) for text in seen) else TEXT


class Unfit(Exception):
    """One value of a column does not have its kind."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


def column_of_texts(name: str, texts: Sequence[str], kind: str, missing: Sequence[str]) -> Column:
    """A column of a kind out of texts.

    Raises:
        Unfit: the first text that is none of this kind.
    """
    absent = [text in missing for text in texts]
    if kind == TEXT:
        return text_column(name, [None if gone else text for text, gone in zip(texts, absent, strict=True)])
    if kind == BYTES:
        raise Unfit(0, "a file of text has no bytes; say text")
    if kind.startswith(LIST):
        raise Unfit(0, "one field of a line has no list of values; use JSON lines or Parquet")
    valid = ~np.array(absent, np.bool_)
    parse, what = _parser(kind)
    filled = ["0" if gone else text for text, gone in zip(texts, absent, strict=True)] if any(absent) else texts
    try:
        values = parse(filled, absent)
    except (ValueError, OverflowError, KeyError):
        place = next(place for place in range(len(texts)) if not absent[place] and not _fits(parse, texts[place]))
        raise Unfit(place, f"{texts[place][:60]!r} is no {what}") from None
    return Column(field=Field(name=name, kind=kind), values=values, valid=None if valid.all() else valid)


def _fits(parse: Any, text: str) -> bool:
    try:
        parse([text], [False])
    except (ValueError, OverflowError, KeyError):
        return False
    return True


def _parser(kind: str) -> tuple[Any, str]:
    dtype = np.dtype(kind)
    if dtype.kind == "b":
        return lambda texts, gone: np.array(
            [lost or _TRUTHS[text] for text, lost in zip(texts, gone, strict=True)], np.bool_
        ), ("truth value (true or false)")
    if dtype.kind == "M":
        return lambda texts, gone: _times(texts, gone, dtype), "time such as 2026-01-31 or 2026-01-31T12:00:00"
    if dtype.kind == "f":
        return lambda texts, gone: _reals(texts, dtype), f"number ({dtype})"
    return lambda texts, gone: _wholes(texts, dtype), f"whole number of {dtype}"


def _reals(texts: Sequence[str], dtype: np.dtype[Any]) -> NDArray[Any]:
    _refuse_underscores(texts)
    return np.fromiter(map(float, texts), dtype=np.float64, count=len(texts)).astype(dtype)


def _wholes(texts: Sequence[str], dtype: np.dtype[Any]) -> NDArray[Any]:
    _refuse_underscores(texts)
    if dtype == np.uint64:
        return np.fromiter(map(int, texts), dtype=np.uint64, count=len(texts))
    values = np.fromiter(map(int, texts), dtype=np.int64, count=len(texts))
    return narrowed(values, dtype)


def narrowed(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Whole numbers of a smaller type.

    Raises:
        OverflowError: one does not fit.
    """
    limits = np.iinfo(dtype)
    if len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise OverflowError
    return values.astype(dtype)


def _times(texts: Sequence[str], gone: Sequence[bool], dtype: np.dtype[Any]) -> NDArray[Any]:
    plain = ["1970-01-01" if lost else text for text, lost in zip(texts, gone, strict=True)]
    if not all(_TIME.fullmatch(text) for text in plain):
        raise ValueError
    return np.array([text.removesuffix("Z") for text in plain], dtype=dtype)


def _refuse_underscores(texts: Sequence[str]) -> None:
    # Python reads 1_000 as a number, and nothing else that writes files does.
    joined = "".join(texts)
    if "_" in joined or not joined.isascii():
        raise ValueError


def join_kinds(one: str, other: str) -> str | None:
    """The kind that holds the values of both; None where there is none."""
    if one == other or other == UNKNOWN:
        return one
    if one == UNKNOWN:
        return other
    if {one, other} <= {INTEGER, FLOAT}:
        return FLOAT
    if {one, other} == {LIST + INTEGER, LIST + FLOAT}:
        return LIST + FLOAT
    return None


def kind_of_value(value: Any) -> str | None:
    """The kind of a value of JSON; None where no column can hold it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INTEGER if -(2**63) <= value < 2**63 else FLOAT
    if isinstance(value, float):
        return FLOAT
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        if not value:
            return LIST + INTEGER
        kinds = {kind_of_value(item) for item in value}
        if kinds <= {INTEGER, FLOAT}:
            return LIST + (FLOAT if FLOAT in kinds else INTEGER)
        return LIST + BOOL if kinds == {BOOL} else None
    return None


def column_of_values(name: str, values: Sequence[Any], kind: str) -> Column:
    """A column of a kind out of values of JSON; None is missing.

    Raises:
        Unfit: the first value that is none of this kind.
    """
    for place, value in enumerate(values):
        found = kind_of_value(value)
        if found is None or (found != UNKNOWN and not _goes_in(found, kind)):
            raise Unfit(place, f"{str(value)[:60]!r} is no {kind.removeprefix('<')}")
    valid = np.array([value is not None for value in values], np.bool_)
    mask = None if valid.all() else valid
    if kind == TEXT:
        return text_column(name, values)
    field = Field(name=name, kind=kind)
    if kind.startswith(LIST):
        rows = [() if value is None else value for value in values]
        flat = [item for row in rows for item in row]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        return Column(field=field, values=_numbers(flat, field.dtype), offsets=offsets, valid=mask)
    if field.dtype.kind == "M":
        texts = ["" if value is None else value for value in values]
        return column_of_texts(name, texts, kind, ("",))
    try:
        return Column(
            field=field, values=_numbers([0 if value is None else value for value in values], field.dtype), valid=mask
        )
    except OverflowError:
        if field.dtype.kind == "f":
            place = next(at for at, value in enumerate(values) if value is not None and abs(value) > _LARGEST)
            raise Unfit(place, f"a whole number beyond {_LARGEST:g} is outside {field.dtype}") from None
        limits = np.iinfo(field.dtype)
        place = next(
            at for at, value in enumerate(values) if value is not None and not limits.min <= value <= limits.max
        )
        raise Unfit(place, f"{values[place]} is outside {field.dtype}") from None


def _goes_in(found: str, kind: str) -> bool:
    """Whether a value of JSON of the kind ``found`` may stand in a column of ``kind``."""
    if found.startswith(LIST) or kind.startswith(LIST):
        return found.startswith(LIST) and kind.startswith(LIST) and _goes_in(found[len(LIST) :], kind[len(LIST) :])
    if kind == TEXT or np.dtype(kind).kind == "M":
        return found == TEXT
    letter = np.dtype(kind).kind
    return found in {"b": (BOOL,), "i": (INTEGER,), "u": (INTEGER,), "f": (INTEGER, FLOAT)}[letter]


def _numbers(values: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind in "iu" and dtype != np.uint64:
        return narrowed(np.array(values, dtype=np.int64), dtype)
    return np.array(values, dtype=dtype)
