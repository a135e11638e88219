"""JSON from a file that may be hostile, and the plain values of a checkpoint as JSON.

Python's parser keeps the last of two equal keys, accepts NaN, and lets a small file grow into a large tree; msgspec's keeps the
last of two equal keys too. Here two equal keys are an error, and the number of values is bounded before anything is built. The
functions for single fields give the value or raise ``ValueError`` with what was found.

JSON has no infinity and no NaN, and a training run has both: the best loss before the first evaluation, the loss of a skipped
step. ``pack`` writes them as ``{"$float": "inf"}``, so that every JSON parser reads the manifest and no checkpoint fails for
the want of a number.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from shoal.checkpoint.files import is_shard_name

# Each value of a tree follows one of these marks, so their number bounds the memory that parsing takes: about 100 bytes each.
_MARKS = (b",", b"[", b"{")
MAX_MARKS = 2_000_000


def parse(data: bytes) -> Any:
    """The tree that ``data`` holds.

    Raises:
        ValueError: it is not JSON, repeats a key, nests too deeply, holds too many values or a number that JSON does not have.
    """
    marks = sum(data.count(mark) for mark in _MARKS)
    if marks > MAX_MARKS:
        raise ValueError(f"it holds {marks} values, more than {MAX_MARKS}")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_refuse_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} stands twice in one object")
    return tree


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


_TAG = "$float"
_NAMED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def pack(value: Any) -> Any:
    """A copy of ``value`` that is JSON and shares nothing with it; tuples become lists.

    Raises:
        ValueError: something in it is no JSON, or a key is not a text.
    """
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and key != _TAG for key in value):
            raise ValueError(f"the keys of a value are texts other than {_TAG!r}, not {list(value)[:5]}")
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: next(name for name, number in _NAMED.items() if str(number) == str(float(value)))}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{type(value).__name__} is not a value that JSON can hold")


def unpack(tree: Any) -> Any:
    """What was packed, with lists for tuples.

    Raises:
        ValueError: a number has a name that ``pack`` does not give.
    """
    if isinstance(tree, dict):
        if _TAG not in tree:
            return {key: unpack(item) for key, item in tree.items()}
        if len(tree) == 1 and isinstance(tree[_TAG], str) and tree[_TAG] in _NAMED:
            return _NAMED[tree[_TAG]]
        raise ValueError(f"a value has a {_TAG} that is none of {', '.join(_NAMED)}")
    if isinstance(tree, list):
        return [unpack(item) for item in tree]
    return tree


MAX_NUMBER = 2**62
_MAX_DIMS = 32
_MAX_NAME = 1024


def check_object(what: str, tree: Any, *keys: str) -> None:
    """Refuse what is not an object with exactly these keys."""
    if not isinstance(tree, dict) or set(tree) != set(keys):
        raise ValueError(f"{what} is not an object with the keys {', '.join(keys)}")


def mapping(what: str, tree: Any) -> dict[str, Any]:
    """An object with any keys."""
    if not isinstance(tree, dict):
        raise ValueError(f"{what} is not an object")
    return tree


def text(what: str, value: Any) -> str:
    """A text of bounded length."""
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise ValueError(f"{what} is not a text of up to {_MAX_NAME} characters")
    return value


def tensor_name(value: Any) -> str:
    """A name that a tensor can have, in a manifest and in a safetensors header."""
    name = text("a tensor's name", value)
    # A lone surrogate is valid in JSON and in Python, and in no file that others can read.
    if not name or name == "__metadata__" or not name.isprintable():
        raise ValueError(f"{name[:80]!r} cannot name a tensor")
    return name


def file_name(value: Any) -> str:
    """The plain name of a shard."""
    if not isinstance(value, str) or not is_shard_name(value):
        raise ValueError(f"{str(value)[:80]!r} is not a shard's name such as rank-000.safetensors")
    return value


def number(what: str, value: Any) -> int:
    """A whole number that a file can have: a size, a step, a dim."""
    # bool is an int in Python and never a count.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{what} is {str(value)[:80]}, not a whole number of at least 0")
    return value


def shape_of(name: str, value: Any) -> tuple[int, ...]:
    """The dims of a tensor, or the place of a piece in one."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise ValueError(f"a shape of {name[:80]!r} is not a list of up to {_MAX_DIMS} numbers")
    return tuple(number(f"a dim of {name[:80]!r}", dim) for dim in value)
