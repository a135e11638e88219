"""The folder of published versions: written whole and then pointed to, read through sums, the oldest taken away.

::

    published/
        newest                         {"version": 7, "sha256": of its version.json}
        version-00000007/              version.json  recipe.toml  model.safetensors  (what prepares raw rows)
        .tmp-version-00000008-<id>/    being written, or left by a run that died

A version gets its name when all of its files are on the disk, and the pointer is replaced when the version has its name. So
whoever follows the pointer finds a whole version at every moment, also when the run is killed at any of these. What it finds is
held to its sums all the same. A number is never given twice.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.checkpoint.commit import remove
from shoal.checkpoint.files import NotWhole, draw_id, existing_file, folder, new_file, read_into, sync_folder
from shoal.checkpoint.published.version import (
    DESCRIPTION,
    NEWEST,
    RECIPE,
    WEIGHTS,
    FileSum,
    Version,
    decode,
    decode_pointer,
    encode,
    encode_pointer,
    parse_version,
    version_name,
)
from shoal.checkpoint.shard import Blob, write_shard
from shoal.core.errors import ShoalError

_MAX_DESCRIPTION = 4 * 2**20
_MAX_RECIPE = 4 * 2**20
_MAX_BESIDE = 2**30
_DRAFT, _EXPIRED = ".tmp-version-", ".expired-version-"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A version whose bytes have proved to be what was published."""

    version: Version
    recipe: bytes
    weights: bytes
    """A safetensors file."""
    beside: Mapping[str, bytes]
    """Other files, by their names."""
    path: Path


def published_numbers(root: Path) -> list[int]:
    """The numbers of the versions in a folder, the newest first; none where there is no folder."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted((number for name in names if (number := parse_version(name)) is not None), reverse=True)


def clear_drafts(root: Path) -> None:
    """Remove what a run left that died while it published; for the process that publishes, which is alone."""
    for name in os.listdir(root) if root.is_dir() else ():
        if name.startswith((_DRAFT, _EXPIRED)):
            remove(root / name)


def publish(
    root: Path,
    version: Version,
    weights: Mapping[str, Blob],
    recipe: bytes,
    *,
    keep: int,
    beside: Mapping[str, bytes] | None = None,
) -> Version:
    """Write a version whole, point to it, and take away what is older than ``keep`` versions.

    Args:
        root: the folder of versions; made where it is missing.
        version: what is known of it; its number and the sums of its files are given here.
        weights: by the names of the model.
        recipe: that the model is built by.
        keep: how many of the newest stay.
        beside: other files that whoever serves it needs.

    Returns:
        The version as it was published.

    Raises:
        OSError: the disk refused; the version before stays the newest.
    """
    root.mkdir(exist_ok=True)
    number = 1 + max([*published_numbers(root), _pointed(root)])
    draft = root / f"{_DRAFT}{number:08d}-{draw_id()}"
    try:
        draft.mkdir()
        _write(draft / RECIPE, recipe)
        write_shard(draft / WEIGHTS, weights, metadata={"format": "pt"})
        for name, content in (beside or {}).items():
            _write(draft / name, content)
        names = (RECIPE, WEIGHTS, *(beside or {}))
        version = replace(version, number=number, files={name: _sum_of(draft / name) for name in names})
        data = encode(version)
        _write(draft / DESCRIPTION, data)
        sync_folder(draft)
        os.rename(draft, root / version_name(number))
        sync_folder(root)
    finally:
        remove(draft)
    _point(root, number, hashlib.sha256(data).hexdigest())
    for old in published_numbers(root)[keep:]:
        # Renamed first: nobody opens a version of which some files are gone.
        aside = root / f"{_EXPIRED}{old:08d}-{draw_id()}"
        os.rename(root / version_name(old), aside)
        remove(aside)
    return version


def _point(root: Path, number: int, sha256: str) -> None:
    beside = root / f".{NEWEST}.{draw_id()}"
    try:
        _write(beside, encode_pointer(number, sha256))
        os.replace(beside, root / NEWEST)
        sync_folder(root)
    finally:
        beside.unlink(missing_ok=True)


def _pointed(root: Path) -> int:
    try:
        pointer = read_pointer(root)
    except NotWhole:
        return 0
    return 0 if pointer is None else pointer[0]


def read_pointer(root: Path) -> tuple[int, str] | None:
    """The newest version's number and the sum of its description; None where nothing was published.

    Raises:
        NotWhole: the pointer is altered.
    """
    if not os.path.lexists(root / NEWEST):
        return None
    with folder(root) as folder_fd:
        return decode_pointer(_read(folder_fd, NEWEST, limit=4096))


def open_version(root: Path, number: int, *, expect: str | None = None) -> Opened:
    """A version, every byte of which is held to its sum before anybody uses it.

    Args:
        root: the folder of versions.
        number: of the version.
        expect: the sum of its description, as the pointer has it.

    Raises:
        NotWhole: names the file that is missing, torn or altered.
        RequestError: there is no such version.
    """
    path = root / version_name(number)
    with folder(path) as folder_fd:
        data = _read(folder_fd, DESCRIPTION, limit=_MAX_DESCRIPTION)
        found = hashlib.sha256(data).hexdigest()
        if expect is not None and found != expect:
            raise NotWhole(f"{DESCRIPTION} has the sum {found[:16]}..., and the pointer says {expect[:16]}...")
        version = decode(data)
        if version.number != number:
            raise NotWhole(f"{DESCRIPTION} is of version {version.number}, the folder of version {number}")
        recipe = _read_summed(folder_fd, RECIPE, version.files[RECIPE], limit=_MAX_RECIPE)
        weights = _read_summed(folder_fd, WEIGHTS, version.files[WEIGHTS])
        others = {name: entry for name, entry in version.files.items() if name not in (RECIPE, WEIGHTS)}
        beside = {name: _read_summed(folder_fd, name, entry, limit=_MAX_BESIDE) for name, entry in others.items()}
    return Opened(version=version, recipe=recipe, weights=weights, beside=beside, path=path)


def read_newest(root: Path) -> Version | None:
    """The description of the newest version; None where there is none that is whole."""
    try:
        pointer = read_pointer(root)
        if pointer is None:
            return None
        with folder(root / version_name(pointer[0])) as folder_fd:
            data = _read(folder_fd, DESCRIPTION, limit=_MAX_DESCRIPTION)
    except (ShoalError, OSError):
        return None
    return decode(data) if hashlib.sha256(data).hexdigest() == pointer[1] else None


def _read_summed(folder_fd: int, name: str, entry: FileSum, *, limit: int | None = None) -> bytes:
    data = _read(folder_fd, name, limit=limit, size=entry.size)
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise NotWhole(f"{name} has the sum {found[:16]}..., and its description says {entry.sha256[:16]}...")
    return data


def _read(folder_fd: int, name: str, *, limit: int | None = None, size: int | None = None) -> bytes:
    with existing_file(folder_fd, name) as (fd, found):
        if size is not None and found != size:
            raise NotWhole(f"{name} has {found} bytes, and its description says {size}")
        if limit is not None and found > limit:
            raise NotWhole(f"{name} has {found} bytes, more than {limit}")
        data = bytearray(found)
        read_into(fd, memoryview(data), 0, name)
    return bytes(data)


def _write(path: Path, data: bytes) -> None:
    with new_file(path) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]


def _sum_of(path: Path) -> FileSum:
    with path.open("rb") as file:
        return FileSum(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
