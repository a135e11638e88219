"""What a published version says of itself, as values and as JSON. Read strictly: whoever serves it may not have written it.

No torch: a version can be listed, and an altered one refused, in a moment.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.checkpoint import strictjson
from shoal.checkpoint.files import NotWhole

FORMAT = 1
DESCRIPTION = "version.json"
WEIGHTS = "model.safetensors"
RECIPE = "recipe.toml"
NEWEST = "newest"
"""The pointer beside the versions: the number of one, and the sum of its description."""

_BESIDE = re.compile(r"[a-z]{1,40}\.(?:json|safetensors)", re.ASCII)
"""Files besides: what prepares raw rows for the model, where the run has steps for that."""
_MAX_FILES = 8
_NAME = re.compile(r"version-([0-9]{8,18})", re.ASCII)
_SHA = re.compile(r"[0-9a-f]{64}", re.ASCII)
_KINDS = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def version_name(number: int) -> str:
    """``7`` -> ``version-00000007``."""
    return f"version-{number:08d}"


def parse_version(name: str) -> int | None:
    """The number of a version's folder; None for every other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and version_name(int(match[1])) == name else None


@dataclass(frozen=True, kw_only=True)
class InputField:
    """One tensor that the model takes, for one sample."""

    name: str
    dtype: str
    """As torch calls it, such as float32."""
    shape: tuple[int, ...]
    """Without the dim of samples."""
    below: int | None = None
    """Whole numbers are at least 0 and below this, as token ids are; None where nothing is known."""
    is_sequence: bool = False
    """The last dim may be shorter."""


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """The length and the SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Version:
    """A published model: what it was trained on, how good it was found, and the sums of its files."""

    number: int
    step: int
    """Steps that its weights were trained for."""
    weights_sha256: str
    """Of the whole weights, as ``summary.json`` has it."""
    data_version: int
    """Of data that grows, that the step was trained on; 0 of other data."""
    loss: float
    """On the held-back window."""
    window: str
    """Names the held-back window by the sum of its samples: losses on others do not compare."""
    window_samples: int
    published: float
    """When, in seconds since 1970."""
    spec: Mapping[str, Any]
    """The shapes of the data, by which the model is built."""
    inputs: tuple[InputField, ...]
    is_keyed: bool
    """The model is called by the names of its inputs, not by their places."""
    files: Mapping[str, FileSum] = field(default_factory=dict)


def encode(version: Version) -> bytes:
    """The description as it is written."""
    values = {"format": FORMAT, **asdict(version)}
    return (json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def decode(data: bytes) -> Version:
    """What a description says.

    Raises:
        NotWhole: it is torn, altered or of another format.
    """
    try:
        return _decode(strictjson.parse(data))
    except ValueError as error:
        raise NotWhole(f"{DESCRIPTION} is not what a version has: {error}") from error


def _decode(tree: Any) -> Version:
    strictjson.check_object("it", tree, "format", *Version.__dataclass_fields__)
    if strictjson.number("format", tree["format"]) != FORMAT:
        raise ValueError(f"its format is {tree['format']}, and this program reads {FORMAT}")
    files = {}
    for name, entry in strictjson.mapping("files", tree["files"]).items():
        if name not in (WEIGHTS, RECIPE) and (name == DESCRIPTION or _BESIDE.fullmatch(name) is None):
            raise ValueError(f"{name[:80]!r} is no file of a version")
        strictjson.check_object(name, entry, *FileSum.__dataclass_fields__)
        files[name] = FileSum(size=strictjson.number("size", entry["size"]), sha256=_sha(entry["sha256"]))
    if not {WEIGHTS, RECIPE} <= set(files) or len(files) > _MAX_FILES:
        raise ValueError(f"it has the files {sorted(files)[:_MAX_FILES]}, and a version has {RECIPE} and {WEIGHTS}")
    inputs = tree["inputs"]
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= 256:
        raise ValueError("inputs is not a list of 1 to 256 fields")
    return Version(
        number=strictjson.number("number", tree["number"]),
        step=strictjson.number("step", tree["step"]),
        weights_sha256=_sha(tree["weights_sha256"]),
        data_version=strictjson.number("data_version", tree["data_version"]),
        loss=_finite("loss", tree["loss"]),
        window=_sha(tree["window"]),
        window_samples=strictjson.number("window_samples", tree["window_samples"]),
        published=_finite("published", tree["published"]),
        spec=strictjson.mapping("spec", tree["spec"]),
        inputs=tuple(_input(one) for one in inputs),
        is_keyed=_truth("is_keyed", tree["is_keyed"]),
        files=files,
    )


def _input(tree: Any) -> InputField:
    strictjson.check_object("an input", tree, *InputField.__dataclass_fields__)
    name = strictjson.text("the name of an input", tree["name"])
    if tree["dtype"] not in _KINDS:
        raise ValueError(
            f"input {name!r} has the type {str(tree['dtype'])[:80]!r}, which is none of {', '.join(_KINDS)}"
        )
    below = None if tree["below"] is None else strictjson.number("below", tree["below"])
    shape = strictjson.shape_of(name, tree["shape"])
    is_sequence = _truth("is_sequence", tree["is_sequence"])
    return InputField(name=name, dtype=tree["dtype"], shape=shape, below=below, is_sequence=is_sequence)


def _truth(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is neither true nor false")
    return value


def _finite(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {str(value)[:80]}, not a finite number")
    return float(value)


def _sha(value: Any) -> str:
    if not isinstance(value, str) or _SHA.fullmatch(value) is None:
        raise ValueError(f"{str(value)[:80]!r} is no SHA-256")
    return value


def encode_pointer(number: int, sha256: str) -> bytes:
    """The text of the pointer."""
    return (json.dumps({"version": number, "sha256": sha256}) + "\n").encode()


def decode_pointer(data: bytes) -> tuple[int, str]:
    """The number of the newest version, and the sum of its description.

    Raises:
        NotWhole: it is torn or altered.
    """
    try:
        tree = strictjson.parse(data)
        strictjson.check_object("it", tree, "version", "sha256")
        return strictjson.number("version", tree["version"]), _sha(tree["sha256"])
    except ValueError as error:
        raise NotWhole(f"the pointer {NEWEST!r} is not what a run writes: {error}") from error
