"""The files of a store: what they are called, reading one and proving its bytes, and the versions that are there.

    versions/manifest-00000001.json   created exclusively: whoever is first makes the version, and nobody changes it again
    blocks/DIGEST.block               rows
    parts/DIGEST.block                lists of blocks
    index/DIGEST.block                from keys to rows
    splits/NAME.json                  named cuts into train, validation and test
    building/                         what a build has done so far; gone when it is done

A file that is named by its digest is never changed: writing it again writes the same bytes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError, ShoalError
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import AlreadyThere, Missing, NoListing, Storage
from shoal.data.store.block import digest_block, read_block
from shoal.data.store.errors import BrokenFile
from shoal.data.store.manifest import FileRef, Manifest, read_manifest
from shoal.data.table import Schema, Table

BLOCKS, PARTS, INDEX, SPLITS, BUILDING, VERSIONS = "blocks", "parts", "index", "splits", "building", "versions"
_MANIFEST = re.compile(r"manifest-(\d{8})\.json")
_MOST_VERSIONS = 100_000_000
"""A version's number has eight digits."""
_FETCHES = 2
"""How often a file is read before its bytes are called wrong: a store far away may have sent them wrongly."""


@dataclass(frozen=True)
class StoreFolder:
    """A place in a storage where a store is, or is to be."""

    storage: Storage
    prefix: str

    @property
    def address(self) -> str:
        """For people."""
        root = self.storage.address
        return f"{root.rstrip('/')}/{self.prefix}" if self.prefix else root

    def path(self, *names: str) -> str:
        """A file's path in the storage."""
        return "/".join([*([self.prefix] if self.prefix else []), *names])

    def local_path(self, *names: str) -> Path | None:
        """Where the file lies on this machine; None where it lies elsewhere."""
        find: Any = getattr(self.storage, "local_path", None)
        return None if find is None else find(self.path(*names))

    def read(self, folder: str, ref: FileRef) -> memoryview:
        """The bytes of a file that is named by its digest, proven.

        Raises:
            BrokenFile: it is gone, or its bytes are not what the manifest says, however often they are read.
        """
        name = block_name(ref.digest)
        problem = ""
        for _ in range(_FETCHES):
            try:
                data = self.storage.read(self.path(folder, name))
            except Missing:
                raise BrokenFile(f"{self.address}/{folder}/{name}", "it is gone; the manifest names it") from None
            problem = check_bytes(memoryview(data), ref)
            if not problem:
                return memoryview(data)
        raise BrokenFile(f"{self.address}/{folder}/{name}", problem)

    def read_table(self, folder: str, ref: FileRef, schema: Schema) -> Table:
        """A small table that is kept in the format of blocks.

        Raises:
            BrokenFile: it is not what was written.
        """
        file = f"{self.address}/{folder}/{block_name(ref.digest)}"
        table = read_block(self.read(folder, ref), schema, file=file)
        if len(table) != ref.num_rows:
            raise BrokenFile(file, f"it has {len(table)} rows, and the manifest says {ref.num_rows}")
        return table

    def write(self, folder: str, data: bytes, num_rows: int) -> FileRef:
        """Write a file under its digest; it is on the disk when this returns."""
        ref = FileRef(digest=digest_block(data), num_bytes=len(data), num_rows=num_rows)
        path = self.path(folder, block_name(ref.digest))
        try:
            self.storage.create(path, data)
        except AlreadyThere:
            # The same bytes, or what is left of them. Writing anew makes it young, too: clean-up takes old files only.
            self.storage.replace(path, data)
        return ref

    def versions(self) -> list[int]:
        """The numbers of all versions, the oldest first."""
        try:
            names = [entry.path.rpartition("/")[2] for entry in self.storage.list(self.path(VERSIONS))]
        except NoListing:
            return list(range(1, self._newest_by_asking() + 1))
        return sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))

    def _newest_by_asking(self) -> int:
        """The newest version where nothing is listed; 0 where there is none. Versions are numbered without a gap, so a search by
        halves finds it in some twenty questions, however many there are."""
        beyond = 1
        while beyond < _MOST_VERSIONS and self._has_version(beyond):
            beyond *= 2
        there = beyond // 2
        while beyond - there > 1:
            middle = (there + beyond) // 2
            there, beyond = (middle, beyond) if self._has_version(middle) else (there, middle)
        return there

    def _has_version(self, version: int) -> bool:
        try:
            self.storage.stat(self.path(VERSIONS, manifest_name(version)))
        except Missing:
            return False
        return True

    def newest_version(self) -> int | None:
        """The number of the newest version; None where there is no store."""
        return max(self.versions(), default=None)

    def manifest(self, version: int | None = None) -> Manifest:
        """A version; the newest when left out.

        Raises:
            RequestError: there is no store, or no such version.
            BrokenFile: its manifest is not what was written.
        """
        if version is None:
            version = self.newest_version()
            if version is None:
                raise RequestError(
                    f"{self.address} is no store of data: it has no manifest; make one with: shoal data build SRC DST"
                )
        name = manifest_name(version)
        try:
            data = self.storage.read(self.path(VERSIONS, name))
        except Missing:
            there = self.versions()
            said = f"it has versions {there[0]} to {there[-1]}" if there else "it is no store of data"
            raise RequestError(f"{self.address} has no version {version}; {said}") from None
        return read_manifest(data, file=f"{self.address}/{VERSIONS}/{name}", version=version)


def open_folder(address: str, settings: StorageConfig | None = None) -> StoreFolder:
    """The folder at an address; nothing is looked at yet.

    Raises:
        RequestError: the address is none.
    """
    storage, prefix = open_storage(address, settings)
    return StoreFolder(storage, prefix.strip("/"))


def block_name(digest: str) -> str:
    """Of a file with this digest."""
    return f"{digest}.block"


def manifest_name(version: int) -> str:
    """Of a version's file."""
    return f"manifest-{version:08d}.json"


def check_bytes(data: memoryview, ref: FileRef) -> str:
    """What is wrong with the bytes of a file; empty where nothing is."""
    if len(data) != ref.num_bytes:
        return f"it has {len(data)} bytes, and the manifest says {ref.num_bytes}; it is torn or replaced"
    if digest_block(data) != ref.digest:
        return "its bytes are not those that were written: one at least is altered"
    return ""


def is_store(address: str) -> bool:
    """True where there is a version of a store at an address."""
    try:
        return open_folder(address).newest_version() is not None
    except ShoalError:
        return False
