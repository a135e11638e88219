"""The manifest: what a checkpoint consists of, as one JSON file that proves its own bytes.

Its first field is the xxh3 sum of the file with that field's digits set to zero, so a flipped bit anywhere is found before the
JSON is parsed. A tensor is a list of pieces, boxes that tile it in any way, so that sharded tensors need no other format than
whole ones. Nothing in a manifest is believed: names, types, shapes, sizes and their sums must agree with each other before any
file is opened.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from shoal.checkpoint import strictjson
from shoal.checkpoint.boxes import Box, check_tiling, intersect
from shoal.checkpoint.files import MANIFEST, NotWhole, is_id
from shoal.checkpoint.shard import ITEM_BYTES, FileEntry, ShardLayout, lay_out
from shoal.checkpoint.strictjson import (
    MAX_NUMBER,
    check_object,
    file_name,
    mapping,
    number,
    pack,
    shape_of,
    tensor_name,
    text,
    unpack,
)

FORMAT = "shoal-checkpoint"
VERSION = 1
MAX_BYTES = 32 * 2**20
"""A larger manifest is refused unread; one of a model of a thousand layers takes a few MiB."""
MAX_PIECES = 2**14
"""Of one tensor: as many as ranks could hold a part of it. Looking through a manifest takes some 45 us for each piece."""

_PREFIX = b'{"sum": "'
_BLANK = b"0" * 16
_SMALLEST_CHUNK, _LARGEST_CHUNK = 512, 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor: where it lies in the tensor, and where in which file."""

    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return Box(self.start, self.shape)


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor and the pieces it is made of, in the order of their starts."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank wrote: its file and the tensors in it, of which it may have only some pieces."""

    file: str
    entry: FileEntry
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except its bytes."""

    id: str
    step: int
    world_size: int
    plan: str
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    values: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(entry.size for entry in self.files.values())

    def layouts(self) -> dict[str, ShardLayout]:
        """The exact header and slots that each file must have."""
        contents: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in self.files}
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                contents[piece.file][piece.key] = (tensor.dtype, piece.shape)
        return {name: lay_out(content) for name, content in contents.items()}


def whole_tensor(file: str, key: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    """The entry of a tensor that lies in one piece in one file."""
    piece = Piece(file=file, key=key, start=(0,) * len(shape), shape=shape)
    return TensorEntry(dtype=dtype, shape=shape, pieces=(piece,))


def merge(parts: Sequence[Part], *, id: str, step: int, plan: str, values: Mapping[str, Any]) -> Manifest:
    """One manifest from what every rank wrote.

    Raises:
        NotWhole: two ranks wrote the same elements of a tensor, or do not agree about its type or shape.
    """
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            tensors[name] = _join(name, tensors[name], tensor) if name in tensors else tensor
    files = {part.file: part.entry for part in parts}
    return Manifest(id=id, step=step, world_size=len(parts), plan=plan, tensors=tensors, files=files, values=values)


def _join(name: str, first: TensorEntry, second: TensorEntry) -> TensorEntry:
    """A tensor of which two ranks wrote pieces. That nothing is missing is checked when the manifest is read back."""
    files = f"{second.pieces[0].file} and {first.pieces[0].file}"
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        kinds = f"{second.dtype} {list(second.shape)} and {first.dtype} {list(first.shape)}"
        raise NotWhole(f"{files} hold pieces of {name!r} as {kinds}")
    for new in second.pieces:
        for old in first.pieces:
            if new.box == old.box or intersect(new.box, old.box) is not None:
                raise NotWhole(f"{new.file} and {old.file} both hold the tensor {name!r}, {new.box} and {old.box}")
    pieces = sorted(first.pieces + second.pieces, key=lambda piece: piece.start)
    return TensorEntry(dtype=first.dtype, shape=first.shape, pieces=tuple(pieces))


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``.

    Raises:
        ValueError: one of the values is not JSON.
    """
    tree = {
        "sum": _BLANK.decode(),
        "format": FORMAT,
        "version": VERSION,
        "id": manifest.id,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "plan": manifest.plan,
        "files": {name: _file_tree(manifest.files[name]) for name in sorted(manifest.files)},
        "tensors": {name: _tensor_tree(manifest.tensors[name]) for name in sorted(manifest.tensors)},
        "values": pack(manifest.values),
    }
    data = json.dumps(tree, allow_nan=False).encode()
    return _with_sum(data, xxhash.xxh3_64_hexdigest(data).encode())


def decode(data: bytes) -> Manifest:
    """The manifest that these bytes are.

    Raises:
        NotWhole: the sum does not match, or anything in it does not agree with the rest.
    """
    start, end = len(_PREFIX), len(_PREFIX) + len(_BLANK)
    if not data.startswith(_PREFIX) or data[end : end + 1] != b'"':
        raise NotWhole(f"{MANIFEST} does not begin with its sum")
    actual = xxhash.xxh3_64_hexdigest(_with_sum(data, _BLANK)).encode()
    if actual != data[start:end]:
        raise NotWhole(f"{MANIFEST} has the sum {actual.decode()}, it says {data[start:end]!r}")
    try:
        tree = strictjson.parse(data)
        return _manifest(tree)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotWhole(f"{MANIFEST}: {error}") from error


def encode_part(part: Part) -> bytes:
    """The bytes in which a rank tells the others what it wrote."""
    tensors = {name: _tensor_tree(tensor) for name, tensor in part.tensors.items()}
    return json.dumps({"file": part.file, "entry": _file_tree(part.entry), "tensors": tensors}).encode()


def decode_part(data: bytes) -> Part:
    """What a rank wrote.

    Raises:
        NotWhole: the bytes are not a part.
    """
    try:
        tree = strictjson.parse(data)
        file = file_name(tree["file"])
        entry = _file_entry(file, tree["entry"])
        return Part(file=file, entry=entry, tensors=_tensors(tree["tensors"], {file: entry}, are_whole=False))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotWhole(f"a rank's part of the manifest: {error}") from error


def _with_sum(data: bytes, digits: bytes) -> bytes:
    return data[: len(_PREFIX)] + digits + data[len(_PREFIX) + len(_BLANK) :]


def _file_tree(entry: FileEntry) -> dict[str, Any]:
    return {"size": entry.size, "chunk_bytes": entry.chunk_bytes, "xxh3": list(entry.sums)}


def _tensor_tree(tensor: TensorEntry) -> dict[str, Any]:
    pieces = [
        {"file": piece.file, "key": piece.key, "start": list(piece.start), "shape": list(piece.shape)}
        for piece in tensor.pieces
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": pieces}


def _manifest(tree: Any) -> Manifest:
    check_object(
        "the manifest",
        tree,
        "sum",
        "format",
        "version",
        "id",
        "step",
        "world_size",
        "plan",
        "files",
        "tensors",
        "values",
    )
    if tree["format"] != FORMAT:
        raise ValueError(f"its format is {str(tree['format'])[:80]!r}, not {FORMAT!r}")
    if tree["version"] != VERSION:
        raise ValueError(
            f"its version is {str(tree['version'])[:80]}, this Shoal reads {VERSION}; use the Shoal that wrote it"
        )
    if not is_id(text("id", tree["id"])):
        raise ValueError("its id is not 16 hex digits")
    files = {file_name(name): _file_entry(name, entry) for name, entry in mapping("files", tree["files"]).items()}
    manifest = Manifest(
        id=tree["id"],
        step=number("step", tree["step"]),
        world_size=number("world_size", tree["world_size"]),
        plan=text("plan", tree["plan"]),
        tensors=_tensors(tree["tensors"], files),
        files=files,
        values=unpack(mapping("values", tree["values"])),
    )
    for name, layout in manifest.layouts().items():
        if files[name].size != layout.size:
            raise ValueError(f"{name} has {files[name].size} bytes, its tensors need {layout.size}")
    return manifest


def _file_entry(name: str, tree: Any) -> FileEntry:
    check_object(name, tree, "size", "chunk_bytes", "xxh3")
    size, chunk_bytes = number(f"{name} size", tree["size"]), number(f"{name} chunk_bytes", tree["chunk_bytes"])
    if not _SMALLEST_CHUNK <= chunk_bytes <= _LARGEST_CHUNK:
        raise ValueError(f"{name} has chunks of {chunk_bytes} bytes, not {_SMALLEST_CHUNK} to {_LARGEST_CHUNK}")
    sums = tree["xxh3"]
    if not isinstance(sums, list) or not all(isinstance(digest, str) and is_id(digest) for digest in sums):
        raise ValueError(f"{name}: its sums are not a list of 16 hex digits each")
    if len(sums) != -(-size // chunk_bytes):
        raise ValueError(f"{name} has {len(sums)} sums for {size} bytes in chunks of {chunk_bytes}")
    return FileEntry(size=size, chunk_bytes=chunk_bytes, sums=tuple(sums))


def _tensors(tree: Any, files: Mapping[str, FileEntry], *, are_whole: bool = True) -> dict[str, TensorEntry]:
    tensors = {}
    used: set[tuple[str, str]] = set()
    for name, entry in mapping("tensors", tree).items():
        tensor_name(name)
        tensor = _tensor(name, entry)
        if are_whole:
            check_tiling(name, tensor.shape, [piece.box for piece in tensor.pieces])
        for piece in tensor.pieces:
            if piece.file not in files:
                raise ValueError(f"tensor {name!r} lies in {piece.file}, which is not among the files")
            if (piece.file, piece.key) in used:
                raise ValueError(f"two tensors share {piece.key!r} in {piece.file}")
            used.add((piece.file, piece.key))
        tensors[name] = tensor
    return tensors


def _tensor(name: str, tree: Any) -> TensorEntry:
    check_object(f"tensor {name!r}", tree, "dtype", "shape", "pieces")
    dtype, shape = tree["dtype"], shape_of(name, tree["shape"])
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the type {str(dtype)[:80]!r}, which is none of {', '.join(ITEM_BYTES)}")
    if math.prod(shape) * ITEM_BYTES[dtype] > MAX_NUMBER:
        raise ValueError(f"tensor {name!r} of shape {shape} is larger than any file")
    trees = tree["pieces"]
    if not isinstance(trees, list) or not trees:
        raise ValueError(f"tensor {name!r} has no pieces")
    if len(trees) > MAX_PIECES:
        raise ValueError(f"the pieces of {name!r} are {len(trees)}, more than {MAX_PIECES}")
    pieces = tuple(_piece(name, shape, piece) for piece in trees)
    # One way to write a manifest, whatever the order in which the ranks were heard.
    if any(second.start <= first.start for first, second in itertools.pairwise(pieces)):
        raise ValueError(f"the pieces of {name!r} overlap, or are not in the order of their starts")
    return TensorEntry(dtype=dtype, shape=shape, pieces=pieces)


def _piece(name: str, shape: tuple[int, ...], tree: Any) -> Piece:
    check_object(f"a piece of {name!r}", tree, "file", "key", "start", "shape")
    start, extent = shape_of(name, tree["start"]), shape_of(name, tree["shape"])
    if len(start) != len(shape) or len(extent) != len(shape):
        raise ValueError(f"a piece of {name!r} has {len(start)} and {len(extent)} dims, the tensor has {len(shape)}")
    return Piece(file=file_name(tree["file"]), key=tensor_name(tree["key"]), start=start, shape=extent)
