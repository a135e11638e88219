"""Weights that other programs wrote: a safetensors file, or a Hugging Face folder of them with its index.

They come without the sums of a checkpoint and from anywhere, so nothing in them is believed: the header's length, the types, the
shapes and every offset are checked against the file's size before anything is allocated, an index can only name plain files of
its own folder, and nothing but bytes is ever read. No torch here.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint import strictjson
from shoal.checkpoint.files import NotWhole, existing_file, read_into
from shoal.checkpoint.manifest import TensorEntry, whole_tensor
from shoal.checkpoint.shard import ITEM_BYTES, Slot, Span, num_bytes
from shoal.checkpoint.strictjson import check_object, mapping, number, shape_of, tensor_name
from shoal.core.errors import RequestError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors", re.ASCII)
_MAX_HEADER = 100_000_000
"""Bytes, as safetensors itself has it."""
_MAX_INDEX = 100_000_000
_METADATA = "__metadata__"


@dataclass(frozen=True, kw_only=True)
class ForeignWeights:
    """What lies where in files of other programs."""

    origin: Path
    tensors: Mapping[str, TensorEntry]
    """By the name that the file has for each."""
    _paths: Mapping[str, Path]
    _slots: Mapping[str, Mapping[str, Slot]]

    def read_spans(self, file: str, spans: Mapping[Span, object]) -> Iterator[tuple[Span, bytearray]]:
        """The bytes of parts of a file's tensors, one after the other in the order of the file.

        Raises:
            NotWhole: the file is shorter than it was.
        """
        slots = self._slots[file]
        with _opened(self._paths[file], self.origin) as (fd, _):
            for span in sorted(spans, key=lambda span: slots[span.key].start + span.start):
                data = bytearray(span.end - span.start)
                read_into(fd, memoryview(data), slots[span.key].start + span.start, file)
                yield span, data


def is_foreign(path: Path) -> bool:
    """True for a safetensors file or a folder that holds such weights and is no checkpoint."""
    if path.is_dir():
        return any((path / name).exists() for name in (SINGLE, INDEX))
    return path.name.endswith(_SUFFIX)


def read_foreign(path: Path) -> ForeignWeights:
    """The tensors of a safetensors file, or of a folder with ``model.safetensors`` or its index; no data is read.

    Raises:
        RequestError: there is no such file, or nothing in the folder that can be read without running code.
        NotWhole: a file is not what it must be; names it and both numbers.
    """
    if not path.is_dir():
        if _require(path).suffix in _PICKLES and _is_archive(path):
            raise RequestError(
                f"{path} is a file of torch.save, a pickle: loading it may run any code; load it yourself by "
                "model.load_state_dict(torch.load(path, weights_only=True)), or convert it with safetensors.torch.save_file"
            )
        return _of_files(path, {path.name: path})
    if (path / INDEX).exists():
        return _of_index(path)
    if not (path / SINGLE).exists():
        pickled = sorted(one.name for one in path.iterdir() if one.suffix in _PICKLES)
        if pickled:
            raise RequestError(
                f"{path} holds {pickled[0]}, which is a pickle: loading it may run any code; convert it with "
                "safetensors.torch.save_file, where you trust it"
            )
        raise RequestError(f"{path} holds neither {SINGLE} nor {INDEX}; give a folder with weights, or the file itself")
    return _of_files(path, {SINGLE: path / SINGLE})


def _is_archive(path: Path) -> bool:
    """True for what torch.save writes, which begins as a zip archive does."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _require(path: Path) -> Path:
    if not path.exists():
        raise RequestError(f"there are no weights at {path}: no such file or folder")
    return path


def _of_index(path: Path) -> ForeignWeights:
    with _opened(path / INDEX, path) as (fd, size):
        if size > _MAX_INDEX:
            raise NotWhole(f"{INDEX} has {size} bytes, more than {_MAX_INDEX}")
        data = bytearray(size)
        read_into(fd, memoryview(data), 0, INDEX)
    try:
        listed = mapping("weight_map", mapping("it", strictjson.parse(bytes(data))).get("weight_map"))
        where = {tensor_name(name): _file_name(file) for name, file in listed.items()}
    except (ValueError, TypeError) as error:
        raise NotWhole(f"{path / INDEX}: {error}") from error
    found = _of_files(path, {name: path / name for name in sorted(set(where.values()))}, where)
    return found


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or not _FILE.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no plain name of a file such as model-00001-of-00002{_SUFFIX}")
    return value


def _of_files(origin: Path, paths: Mapping[str, Path], where: Mapping[str, str] | None = None) -> ForeignWeights:
    slots: dict[str, dict[str, Slot]] = {}
    tensors: dict[str, TensorEntry] = {}
    for file, path in paths.items():
        with _opened(path, origin) as (fd, size):
            slots[file] = _read_header(fd, size, file)
        for name, slot in slots[file].items():
            if where is None or where.get(name) == file:
                tensors[name] = whole_tensor(file, name, slot.dtype, slot.shape)
    missing = [name for name in where or () if name not in tensors]
    if missing and where is not None:
        raise NotWhole(f"{INDEX} says that {missing[0]!r} is in {where[missing[0]]}, and it is not there")
    return ForeignWeights(origin=origin, tensors=tensors, _paths=dict(paths), _slots=slots)


def _read_header(fd: int, size: int, file: str) -> dict[str, Slot]:
    """Where the tensors of a safetensors file lie: side by side from the header to the file's end, each with its exact size."""
    if size < 8:
        raise NotWhole(f"{file} has {size} bytes, less than the length of a header; it is no safetensors file")
    prefix = bytearray(8)
    read_into(fd, memoryview(prefix), 0, file)
    length = int.from_bytes(prefix, "little")
    if length > min(_MAX_HEADER, size - 8):
        raise NotWhole(
            f"{file} says that its header has {length} bytes, and the file has {size}: it is cut off, or no safetensors file"
        )
    header = bytearray(length)
    read_into(fd, memoryview(header), 8, file)
    try:
        tree = mapping("the header", strictjson.parse(bytes(header)))
        slots = [_slot(tensor_name(name), entry, 8 + length) for name, entry in tree.items() if name != _METADATA]
    except (ValueError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise NotWhole(f"{file}: its header cannot be read: {error}") from error
    slots.sort(key=lambda slot: (slot.start, slot.end))
    end = 8 + length
    for slot in slots:
        if slot.start != end:
            raise NotWhole(f"{file}: {slot.key!r} begins at byte {slot.start}, and the one before it ends at {end}")
        end = slot.end
    if end != size:
        raise NotWhole(f"{file} has {size} bytes, and its header describes {end}")
    return {slot.key: slot for slot in slots}


def _slot(name: str, entry: Any, first: int) -> Slot:
    check_object(f"{name!r}", entry, "dtype", "shape", "data_offsets")
    dtype, shape, offsets = entry["dtype"], shape_of(name, entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name!r} has the type {str(dtype)[:80]!r}, which is none of {', '.join(ITEM_BYTES)}")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"the offsets of {name!r} are not two numbers")
    start, end = (number(f"an offset of {name!r}", offset) for offset in offsets)
    if end - start != num_bytes(dtype, shape):
        raise ValueError(
            f"{name!r} is {dtype} {list(shape)} in {end - start} bytes, and needs {num_bytes(dtype, shape)}"
        )
    return Slot(key=name, dtype=dtype, shape=shape, start=first + start, end=first + end)


def _opened(path: Path, origin: Path) -> AbstractContextManager[tuple[int, int]]:
    """The descriptor and the size of a regular file. A link in a folder may lead to the blobs of a hub's cache only.

    Raises:
        NotWhole: it is missing, leads elsewhere, or is no regular file.
    """
    real = path
    if path != origin and path.is_symlink():
        real = Path(os.path.realpath(path))
        # The hub's cache: models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH.
        allowed = (Path(os.path.realpath(origin)), Path(os.path.realpath(origin)).parent.parent / "blobs")
        if real.parent not in allowed:
            raise NotWhole(f"{path.name} is a link that leads out of {origin}, to {real}")
    elif path == origin:
        real = Path(os.path.realpath(path))
    return existing_file(None, str(real))
