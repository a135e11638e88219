"""What a dataset says of itself, as JSON: it goes into a checkpoint's manifest, and reading it back runs no code."""

import base64
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import RunError

_TAG = "__shoal__"


def encode_state(value: Any, *, origin: str) -> str:
    """A value of dicts, lists, tuples, numbers, texts, bytes, arrays and tensors as JSON.

    Args:
        value: what is kept.
        origin: where it comes from, for the message.

    Raises:
        RunError: it holds something else; says what, and under which key.
    """
    return json.dumps(_encode(value, origin, ""), separators=(",", ":"))


def decode_state(text: str) -> Any:
    """Back from JSON.

    Raises:
        RunError: it is none that ``encode_state`` made.
    """
    try:
        return _decode(json.loads(text))
    # A file may say anything: types that torch has not, shapes that do not fit their bytes, a nest without end.
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RunError(f"the state of a dataset cannot be read: {error}") from error


def _encode(value: Any, origin: str, path: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "data": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        raw = base64.b64encode(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"").decode()
        return {
            _TAG: "tensor",
            "dtype": str(array.dtype).removeprefix("torch."),
            "shape": list(array.shape),
            "data": raw,
        }
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "number" if isinstance(value, np.generic) else "array"
        return {_TAG: kind, "dtype": value.dtype.str, "shape": list(value.shape), "data": raw}
    if isinstance(value, list):
        return [_encode(one, origin, f"{path}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": _encode(list(value), origin, path)}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _encode(one, origin, f"{path}.{key}") for key, one in value.items()}
        pairs = [[_encode(key, origin, path), _encode(one, origin, f"{path}[{key!r}]")] for key, one in value.items()]
        return {_TAG: "dict", "items": pairs}
    raise RunError(
        f"{origin} holds a {type(value).__name__} at {path.lstrip('.') or 'its top'}, which a checkpoint cannot keep; give "
        "numbers, texts, bytes, arrays or tensors, in dicts, lists and tuples"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _decode(one) for key, one in value.items()}
    if kind == "tuple":
        return tuple(_decode(value["items"]))
    if kind == "dict":
        return {_decode(key): _decode(one) for key, one in value["items"]}
    raw = base64.b64decode(value["data"])
    if kind == "bytes":
        return raw
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is no type of tensors")
        found = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return found.reshape(value["shape"])
    if kind in ("array", "number"):
        array = np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array[()] if kind == "number" else array
    raise ValueError(f"{kind!r} is no kind of value")
