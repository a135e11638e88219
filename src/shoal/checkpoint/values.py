"""The plain values of a checkpoint as JSON and back: counts, losses, positions.

JSON has no infinity and no NaN, and a training run has both: the best loss before the first evaluation, the loss of a skipped
step. They are written as ``{"$float": "inf"}``, so that every JSON parser reads the manifest and no checkpoint fails for the
want of a number.
"""

import math
from collections.abc import Mapping
from typing import Any

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
