"""What a request for predictions may say, checked before anything is allocated for it. No torch.

    {"inputs": {"x": [[1, 2], [3, 4]]}}          every input as a list over samples
    {"rows": [{"x": [1, 2]}, {"x": [3, 4]}]}     every sample as an object

The model's own fields say types and shapes. A number is a JSON number that its type can hold: no text, no NaN, and true is no 1.
Where the run has steps that prepare rows, ``rows`` are those as they were read, and go through the steps; ``inputs`` are what the
model takes.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint import strictjson
from shoal.checkpoint.published.version import InputField
from shoal.core.errors import RequestError
from shoal.data.rawrows import Preparation

Row = tuple[NDArray[Any], ...]
"""One sample: an array for each field of the model, in their order."""

_TYPES: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    # numpy has none of it; the model's own type is given on the way to it.
    "bfloat16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}


class BadRequest(ValueError):
    """The request is wrong; the message says where, what was found and what is allowed."""


def read_rows(
    body: bytes, fields: Sequence[InputField], *, most: int, preparation: Preparation | None = None
) -> list[Row]:
    """The samples of a request.

    Args:
        body: JSON.
        fields: of the model.
        most: samples that one request may have.
        preparation: of raw rows, where the run has one.

    Raises:
        BadRequest: it is no such request.
    """
    try:
        tree = strictjson.parse(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict) or len(tree) != 1 or not set(tree) <= {"inputs", "rows"}:
        raise BadRequest('the body is not {"inputs": {...}} or {"rows": [...]}')
    names = [field.name for field in fields]
    if "rows" in tree:
        rows = _sized("rows", tree["rows"], most)
        if preparation is not None:
            return _prepared(rows, fields, preparation)
        return [
            tuple(_array(row[field.name], field, f"rows[{place}].{field.name}") for field in fields)
            for place, row in enumerate(rows)
            if _has_names(f"rows[{place}]", row, names)
        ]
    inputs = tree["inputs"]
    _has_names("inputs", inputs, names)
    columns = [_sized(f"inputs.{name}", inputs[name], most) for name in names]
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len(set(lengths.values())) > 1:
        raise BadRequest(f"the inputs have different numbers of samples: {lengths}")
    return [
        tuple(
            _array(value, field, f"inputs.{field.name}[{place}]") for value, field in zip(sample, fields, strict=True)
        )
        for place, sample in enumerate(zip(*columns, strict=True))
    ]


def _prepared(rows: list[Any], fields: Sequence[InputField], preparation: Preparation) -> list[Row]:
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            names = ", ".join(field.name for field in preparation.given)
            raise BadRequest(f"rows[{place}] is {_kind(row)}, not an object with columns, of {names}")
    try:
        made = preparation.prepare_values(rows)
    except RequestError as error:
        raise BadRequest(str(error)) from None
    arrays = [next(iter(made.values())) if len(fields) == 1 else made[field.name] for field in fields]
    for field, array in zip(fields, arrays, strict=True):
        if array.shape[1:] != field.shape:
            raise BadRequest(
                f"the steps make {list(array.shape[1:])} of a row, and the model takes {list(field.shape)}"
            )
    return [tuple(np.ascontiguousarray(array[place]) for array in arrays) for place in range(len(rows))]


def _sized(what: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        found = f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
        raise BadRequest(f"{what} is {found}, not a list of 1 to {most} samples")
    return value


def _has_names(what: str, value: Any, names: Sequence[str]) -> bool:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} is {_kind(value)}, not an object with {', '.join(names)}")
    if set(value) != set(names):
        raise BadRequest(f"{what} has {sorted(map(_short, value))}, and the model takes {', '.join(names)}")
    return True


def _array(value: Any, field: InputField, where: str) -> NDArray[Any]:
    numbers: list[Any] = []
    shape = list(field.shape)
    if field.is_sequence and shape and isinstance(value, list) and len(shape) == 1:
        if not 1 <= len(value) <= shape[-1]:
            raise BadRequest(f"{where} has {len(value)} numbers, not 1 to {shape[-1]}")
        shape[-1] = len(value)
    _walk(value, shape, 0, field, where, numbers)
    return np.array(numbers, dtype=_TYPES[field.dtype]).reshape(shape)


def _walk(value: Any, shape: list[int], depth: int, field: InputField, where: str, numbers: list[Any]) -> None:
    """Collect the numbers of a nested list that has this shape."""
    if depth == len(shape):
        numbers.append(_number(value, field, where))
        return
    if not isinstance(value, list) or len(value) != shape[depth]:
        found = f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
        raise BadRequest(
            f"{where} is {found}, not a list of {shape[depth]} (a sample has the shape {list(field.shape)})"
        )
    for place, one in enumerate(value):
        _walk(one, shape, depth + 1, field, f"{where}[{place}]", numbers)


def _number(value: Any, field: InputField, where: str) -> Any:
    if field.dtype == "bool":
        if not isinstance(value, bool):
            raise BadRequest(f"{where} is {_kind(value)}, not true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{where} is {_kind(value)}, not a number")
    if field.dtype.startswith("int"):
        limits = np.iinfo(_TYPES[field.dtype])  # type: ignore[type-var]
        low, high = (0, field.below - 1) if field.below is not None else (int(limits.min), int(limits.max))
        if not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(f"{where} is {_short(value)}, not a whole number from {low} to {high}")
        return value
    largest = float(np.finfo(_TYPES[field.dtype]).max)  # type: ignore[type-var]
    # A whole number of a thousand digits has no float at all; python compares it exactly.
    if not -largest <= value <= largest or not math.isfinite(value):
        raise BadRequest(f"{where} is {_short(value)}, beyond what {field.dtype} holds")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    # A whole number of a million digits takes python long to print.
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"
    return str(value)[:40]
