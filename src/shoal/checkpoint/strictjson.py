"""JSON from a file that may be hostile.

Python's parser keeps the last of two equal keys, accepts NaN, and lets a small file grow into a large tree. Here two equal keys
are an error, and the number of values is bounded before anything is built.
"""

import json
from typing import Any

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
