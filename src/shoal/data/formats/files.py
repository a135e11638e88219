"""The files behind an address, in one order, each of which can be opened as Python opens a file.

What is read is asked of a storage in ranges, so a file of an object store is read as one of this machine is, and never whole.
"""

import fnmatch
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import BinaryIO, cast
from urllib.parse import unquote

from shoal.core.errors import RequestError, did_you_mean
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.local import LocalStorage
from shoal.data.storage.memory import MemoryStorage
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import Entry, Missing, Storage, join
from shoal.data.tiers.cache import BlockCache
from shoal.data.tiers.config import CacheConfig, check_cache
from shoal.data.tiers.reading import CachedStorage

_BUFFER = 1 << 20
_HERE = (LocalStorage, MemoryStorage)
"""Storages that need no cache; the versions of the second mean nothing to another process."""
HIVE_MISSING = "__HIVE_DEFAULT_PARTITION__"
"""What Hive calls the folder of rows whose key is missing."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a dataset."""

    storage: Storage
    path: str
    """Inside the storage."""
    inside: str
    """Below the address that was given; its folders are what Hive keys and labels of images are read from."""
    num_bytes: int
    version: str = ""
    """Of the content, as the storage says it; empty where it says nothing."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """``key=value`` of its folders; None is missing."""

    @property
    def name(self) -> str:
        """As messages call it."""
        root = self.storage.address
        return f"/{self.path}" if isinstance(self.storage, LocalStorage) and root == "/" else join(root, self.path)

    @property
    def suffixes(self) -> list[str]:
        """What its name ends in, in lower case: ``['.csv', '.gz']``."""
        return [suffix.lower() for suffix in PurePosixPath(self.path).suffixes]

    def open(self) -> BinaryIO:
        """The bytes, to be read and moved about in."""
        if isinstance(self.storage, LocalStorage):
            try:
                return self.storage.local_path(self.path).open("rb")
            except OSError as error:
                raise RequestError(f"{self.name} cannot be read: {error.strerror}") from error
        return cast(BinaryIO, io.BufferedReader(_Ranged(self.storage, self.path, self.num_bytes), _BUFFER))

    def open_text(self) -> BinaryIO:
        """The bytes of a file of lines, unpacked where its name ends in ``.gz``; nobody may read them whole."""
        return cast(BinaryIO, _Unpacked(self.open())) if self.suffixes[-1:] == [".gz"] else self.open()


class _Unpacked(gzip.GzipFile):
    """A .gz file that closes what it reads."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed, mode="rb")
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


class _Ranged(io.RawIOBase):
    """A file of a storage, read by ranges."""

    def __init__(self, storage: Storage, path: str, size: int) -> None:
        self._storage, self._path, self._size, self._at = storage, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        found = self._storage.read(self._path, self._at, end)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def find_files(
    address: str, pattern: str | None = None, settings: StorageConfig | None = None, *, may_be_empty: bool = False
) -> list[DataFile]:
    """The files of a dataset, sorted by path, so that rows have one order everywhere.

    Args:
        address: a file, a folder, or either with ``*`` and ``?`` in it. Names that begin with ``.`` or ``_`` are left out
            of folders, as Spark and Hive do.
        pattern: which files of a folder; all when left out.
        settings: of the storage.
        may_be_empty: a folder without a file has none, and is no error.

    Raises:
        RequestError: there is none.
    """
    stem, wild = _cut_wild(address)
    storage, path = open_storage(stem, settings)
    if wild is None:
        try:
            entry = storage.stat(path)
        except Missing:
            pass
        else:
            inside = PurePosixPath(path).name
            return [_file(storage, entry, inside, _keys_of(path))]
    chosen = [pattern] if pattern else []
    if wild:
        chosen.append(wild)
    prefix = f"{path.strip('/')}/" if path.strip("/") else ""
    found = []
    for entry in storage.list(path):
        inside = entry.path.removeprefix(prefix)
        is_hidden = any(part.startswith((".", "_")) and "=" not in part for part in inside.split("/"))
        if not is_hidden and all(_matches(inside, each) for each in chosen):
            found.append(_file(storage, entry, inside, _keys_of(inside)))
    if not found and not may_be_empty:
        what = f"no file of the pattern {pattern or wild!r}" if chosen else "no file in that folder"
        raise RequestError(
            f"data.path: {address}: there is no such file, and {what}; give a file, a folder or a pattern"
        )
    return found


def cache_files(files: Sequence[DataFile], config: CacheConfig | None) -> tuple[list[DataFile], BlockCache | None]:
    """The same files, read through one cache where they are on another machine; and the cache, where there is one.

    Raises:
        RequestError: the machine does not have what the cache takes.
    """
    if config is None or not (config.memory_bytes or config.disk_bytes):
        return list(files), None
    # Of files on this machine too, which need none: what cannot be is refused wherever it is said.
    check_cache(config)
    if all(isinstance(file.storage, _HERE) for file in files):
        return list(files), None
    cache, near = BlockCache(config), {}
    for storage in {id(file.storage): file.storage for file in files}.values():
        known = [
            Entry(path=file.path, size=file.num_bytes, version=file.version)
            for file in files
            if file.storage is storage
        ]
        near[id(storage)] = storage if isinstance(storage, _HERE) else CachedStorage(storage, cache, known)
    return [replace(file, storage=near[id(file.storage)]) for file in files], cache


def _file(storage: Storage, entry: Entry, inside: str, keys: Mapping[str, str | None]) -> DataFile:
    return DataFile(
        storage=storage, path=entry.path, inside=inside, num_bytes=entry.size, version=entry.version, keys=keys
    )


def _cut_wild(address: str) -> tuple[str, str | None]:
    """The folder above the first ``*`` or ``?``, and what is below it."""
    scheme, separator, rest = address.partition("://")
    parts = (rest if separator else address).split("/")
    place = next((number for number, part in enumerate(parts) if "*" in part or "?" in part), None)
    if place is None:
        return address, None
    stem = "/".join(parts[:place])
    if separator:
        return f"{scheme}://{stem}", "/".join(parts[place:])
    return stem or ("/" if address.startswith("/") else "."), "/".join(parts[place:])


def _matches(inside: str, pattern: str) -> bool:
    if fnmatch.fnmatchcase(inside, pattern) or (
        "/" not in pattern and fnmatch.fnmatchcase(inside.rpartition("/")[2], pattern)
    ):
        return True
    return pattern.startswith("**/") and _matches(inside, pattern.removeprefix("**/"))


def _keys_of(inside: str) -> dict[str, str | None]:
    keys: dict[str, str | None] = {}
    for part in inside.split("/")[:-1]:
        name, equals, value = part.partition("=")
        if equals and name:
            keys[unquote(name)] = None if value == HIVE_MISSING else unquote(value)
    return keys


def prune(files: list[DataFile], where: Mapping[str, tuple[str, ...]]) -> list[DataFile]:
    """The files whose folders have one of the values that are asked for; the others are not opened.

    Raises:
        RequestError: no folder has a key of that name, or nothing is left.
    """
    for key, values in where.items():
        known = {name for file in files for name in file.keys}
        if key not in known:
            raise RequestError(
                f"data.where: no folder has the key {key!r} ({files[0].name} has {', '.join(files[0].keys) or 'none'}); "
                f"{did_you_mean(key, known)}"
            )
        left = [file for file in files if file.keys.get(key) in values]
        if not left:
            there = sorted({str(file.keys.get(key)) for file in files})
            raise RequestError(f"data.where: no folder has {key} in {list(values)}; there are {', '.join(there[:10])}")
        files = left
    return files
