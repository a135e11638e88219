"""The columns of a store as JSON, and the rules for what a column may be.

A store may come from anybody. Types are therefore matched against a list before numpy sees them: ``numpy.dtype`` reads many more
texts, objects among them, than any file should be able to ask for.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import xxhash

from shoal.core.errors import RequestError
from shoal.data.table import BYTES, LIST, TEXT, Field, Schema

MAX_COLUMNS = 4096
MAX_NAME = 512
MAX_DIMS = 8
MAX_ITEMS = 2**40
"""Elements of one value of a fixed shape; what a block holds is bounded by its own length, long before this."""
_DTYPE = re.compile(r"\|[biu]1|<[iu][248]|<f[248]|<[mM]8\[(?:D|h|m|s|ms|us|ns)\]")


def is_dtype(text: str) -> bool:
    """True for a numpy type that a column may have: little-endian numbers, truth values, times and durations."""
    return _DTYPE.fullmatch(text) is not None


def schema_values(schema: Schema) -> list[dict[str, Any]]:
    """The columns as JSON."""
    return [{"name": field.name, "kind": field.kind, "shape": list(field.shape)} for field in schema.fields]


def read_schema(values: Any) -> Schema:
    """The columns out of JSON that nobody vouches for.

    Raises:
        ValueError: it is no schema; says why.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or not 1 <= len(values) <= MAX_COLUMNS:
        raise ValueError(f"a schema is a list of 1 to {MAX_COLUMNS} columns")
    schema = Schema(fields=tuple(_read_field(value) for value in values))
    if len(set(schema.names)) != len(schema.names):
        raise ValueError("two columns have one name")
    return schema


def _read_field(values: Any) -> Field:
    if not isinstance(values, Mapping) or set(values) != {"name", "kind", "shape"}:
        raise ValueError("a column has a name, a kind and a shape")
    name, kind, shape = values["name"], values["kind"], values["shape"]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise ValueError(f"a column's name has 1 to {MAX_NAME} letters")
    if not isinstance(kind, str) or not _is_kind(kind):
        raise ValueError(f"column {name!r} has a kind that is none: {str(kind)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"column {name!r} has a shape that is none")
    if any(not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_ITEMS for size in shape):
        raise ValueError(f"column {name!r} has a shape that is none")
    field = Field(name=name, kind=kind, shape=tuple(shape))
    if math.prod(shape) > MAX_ITEMS or (shape and field.is_ragged):
        raise ValueError(f"column {name!r} has a shape that is none")
    return field


def _is_kind(kind: str) -> bool:
    return kind in (TEXT, BYTES) or is_dtype(kind.removeprefix(LIST))


def check_schema(schema: Schema) -> None:
    """Refuse columns that a store cannot hold.

    Raises:
        RequestError: says which column and why.
    """
    try:
        read_schema(schema_values(schema))
    except ValueError as error:
        raise RequestError(
            f"a store cannot hold this table: {error}; columns are little-endian numbers, truth values, times, text, bytes or "
            "lists of numbers"
        ) from error


@lru_cache(maxsize=64)
def digest_schema(schema: Schema) -> bytes:
    """16 bytes that two schemas share only where they are the same."""
    text = json.dumps(schema_values(schema), ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode("utf-8", "surrogatepass")).digest()


def first_difference(expected: Schema, found: Schema) -> str | None:
    """In which column two schemas differ first, in words; None where they do not."""
    for number, (own, other) in enumerate(zip(expected.fields, found.fields, strict=False)):
        if own != other:
            return f"column {number} is {describe_field(other)} and was {describe_field(own)}"
    if len(expected.fields) != len(found.fields):
        names = sorted(set(expected.names) ^ set(found.names))
        return f"it has {len(found.fields)} columns and had {len(expected.fields)}: {', '.join(names[:5])}"
    return None


def describe_field(field: Field) -> str:
    """One column in a few words."""
    return f"{field.name} {field.kind}{list(field.shape) if field.shape else ''}"
