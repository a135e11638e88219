"""Named splits of a store: which rows are trained on, which validate and which test, as a small file beside the rows.

A split is of one version and stays as it was made: rows that are appended later are in no part of it. Its rows are kept as ranges
or as one bit each, whichever is smaller.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.errors import RequestError, did_you_mean
from shoal.data.storage.protocol import AlreadyThere, Missing, NoListing
from shoal.data.store.block import encode_block
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import SPLITS, StoreFolder
from shoal.data.store.manifest import FileRef
from shoal.data.store.sealed import seal, unseal
from shoal.data.store.selection import RowSelection
from shoal.data.table import Field, Schema, Table, number_column

PARTS = ("train", "validation", "test")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_FILE_RANGES = 1 << 17
_FILE_BITS = 1 << 24
_RANGES = Schema(fields=(Field(name="start", kind="<i8"), Field(name="stop", kind="<i8")))
_BITS = Schema(fields=(Field(name="bits", kind="|u1"),))


@dataclass(frozen=True, kw_only=True)
class Split:
    """A store's rows, cut into parts that share none."""

    name: str
    version: int
    """Of the store, that it was made for."""
    num_rows: int
    """Of that version."""
    parts: Mapping[str, RowSelection]
    """By ``train``, ``validation`` and ``test``."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, for people."""
    digest: str = ""


def write_split(folder: StoreFolder, split: Split, *, replaces: bool = False) -> None:
    """Keep a split in the store under its name.

    Args:
        folder: of the store.
        split: what to keep.
        replaces: over one of the same name.

    Raises:
        RequestError: the name is none or is taken, a part has rows that the version does not have, or two parts share rows.
    """
    if _NAME.fullmatch(split.name) is None:
        raise RequestError(f"{split.name!r} cannot name a split; use small letters, digits, - and _")
    manifest = folder.manifest(split.version)
    if split.num_rows != manifest.num_rows:
        raise RequestError(
            f"the split is of {split.num_rows} rows, and version {split.version} has {manifest.num_rows}"
        )
    _check_parts(split)
    values = {
        "name": split.name,
        "version": split.version,
        "rows": split.num_rows,
        "parts": {name: _write_part(folder, rows, split.num_rows) for name, rows in split.parts.items()},
        "about": dict(split.about),
    }
    path = folder.path(SPLITS, f"{split.name}.json")
    if replaces:
        folder.storage.replace(path, seal(values))
        return
    try:
        folder.storage.create(path, seal(values))
    except AlreadyThere:
        raise RequestError(f"{folder.address} has a split {split.name!r} already; choose another name") from None


def list_splits(folder: StoreFolder) -> list[str]:
    """The names of a store's splits; none where its storage does not list."""
    try:
        names = [entry.path.rpartition("/")[2] for entry in folder.storage.list(folder.path(SPLITS))]
    except NoListing:
        return []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def read_split(folder: StoreFolder, name: str) -> Split:
    """A split by its name.

    Raises:
        RequestError: there is none of this name.
        BrokenFile: it is not what was written, or its parts make no sense.
    """
    file = f"{folder.address}/{SPLITS}/{name}.json"
    if _NAME.fullmatch(name) is None:
        raise RequestError(f"{name!r} cannot name a split; use small letters, digits, - and _")
    try:
        data = folder.storage.read(folder.path(SPLITS, f"{name}.json"))
    except Missing:
        raise RequestError(
            f"{folder.address} has no split {name!r}; {did_you_mean(name, list_splits(folder))}; make one with: shoal data split "
            f"{folder.address} --save {name}"
        ) from None
    values, digest = unseal(data, file=file)
    try:
        split = Split(
            name=values["name"],
            version=int(values["version"]),
            num_rows=int(values["rows"]),
            parts={part: _read_part(folder, values["parts"][part], int(values["rows"])) for part in values["parts"]},
            about=dict(values["about"]),
            digest=digest,
        )
        _check_parts(split)
    except (KeyError, TypeError, ValueError, RequestError) as error:
        raise BrokenFile(file, f"it is no split: {error}") from error
    return split


def split_files(folder: StoreFolder, name: str) -> list[str]:
    """The names of the files that a split consists of, its own left out."""
    values, _ = unseal(folder.storage.read(folder.path(SPLITS, f"{name}.json")), file=name)
    return [f"{digest}.block" for part in values["parts"].values() for digest, _, _ in part["files"]]


def _check_parts(split: Split) -> None:
    if not split.parts or not set(split.parts) <= set(PARTS):
        raise RequestError(
            f"a split has the parts {', '.join(PARTS)}, and this one has {', '.join(split.parts) or 'none'}"
        )
    names = list(split.parts)
    for place, name in enumerate(names):
        rows = split.parts[name]
        if len(rows.starts) and (int(rows.starts[0]) < 0 or int(rows.stops[-1]) > split.num_rows):
            raise RequestError(
                f"the part {name} has row {int(rows.stops[-1]) - 1}, and the version has {split.num_rows} rows"
            )
        if bool((rows.stops <= rows.starts).any()) or bool((rows.starts[1:] < rows.stops[:-1]).any()):
            raise RequestError(f"the part {name} has ranges that are empty or overlap")
        for other in names[:place]:
            if rows.overlaps(split.parts[other]):
                raise RequestError(f"the parts {other} and {name} share rows; a row belongs to one part")


def _write_part(folder: StoreFolder, rows: RowSelection, num_rows: int) -> dict[str, Any]:
    kind = "ranges" if 16 * len(rows.starts) <= num_rows / 8 + 1024 else "bits"
    if kind == "ranges":
        cuts = [slice(at, at + _FILE_RANGES) for at in range(0, len(rows.starts), _FILE_RANGES)]
        pieces = [
            Table.of([number_column("start", rows.starts[cut]), number_column("stop", rows.stops[cut])]) for cut in cuts
        ]
    else:
        mask = np.zeros(num_rows, dtype=np.bool_)
        mask[rows.rows(np.arange(len(rows), dtype=np.int64))] = True
        bits = np.packbits(mask, bitorder="little")
        pieces = [
            Table.of([number_column("bits", bits[at : at + _FILE_BITS])]) for at in range(0, len(bits), _FILE_BITS)
        ]
    refs = [folder.write(SPLITS, encode_block(piece), len(piece)) for piece in pieces]
    return {"rows": len(rows), "kind": kind, "files": [[ref.digest, ref.num_bytes, ref.num_rows] for ref in refs]}


def _read_part(folder: StoreFolder, values: Any, num_rows: int) -> RowSelection:
    kind = values["kind"]
    schema = {"ranges": _RANGES, "bits": _BITS}[kind]
    refs = [
        FileRef(digest=str(digest), num_bytes=int(size), num_rows=int(count)) for digest, size, count in values["files"]
    ]
    if any(re.fullmatch(r"[0-9a-f]{32}", ref.digest) is None for ref in refs):
        raise ValueError("a digest is 32 hexadecimal digits")
    tables = [folder.read_table(SPLITS, ref, schema) for ref in refs]
    empty = np.empty(0, dtype=np.int64)
    if kind == "ranges":
        starts = np.concatenate([empty, *(table["start"].values for table in tables)])
        stops = np.concatenate([empty, *(table["stop"].values for table in tables)])
        # Before the selection takes memory by what they say.
        is_ordered = not bool((stops <= starts).any()) and not bool((starts[1:] < stops[:-1]).any())
        if not is_ordered or (len(stops) and int(stops[-1]) > num_rows):
            raise ValueError("its ranges are empty, overlap, or go beyond the rows")
        found = RowSelection(starts, stops)
    else:
        bits = np.concatenate([table["bits"].values for table in tables]) if tables else np.empty(0, np.uint8)
        if len(bits) != -(-num_rows // 8):
            raise ValueError(f"it has {len(bits)} bytes of bits for {num_rows} rows")
        found = RowSelection.of(np.flatnonzero(np.unpackbits(bits, count=num_rows, bitorder="little")))
    if len(found) != values["rows"]:
        raise ValueError(f"a part says {values['rows']} rows and has {len(found)}")
    return found
