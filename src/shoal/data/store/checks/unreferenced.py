"""Files of a store that no version names: what a build or an append left that was killed, or that lost a race.

Versions only add to one another, so a block that any version names is named by the newest: clean-up never takes one from under a
reader, whichever version it is at. What is being written is told from what was left by its age.
"""

import contextlib
import time
from collections.abc import Iterator

from shoal.core.errors import RequestError
from shoal.data.storage.local import LocalStorage
from shoal.data.storage.protocol import Entry, Missing
from shoal.data.store.folder import BLOCKS, BUILDING, INDEX, PARTS, SPLITS, StoreFolder, block_name
from shoal.data.store.index import PartIndex
from shoal.data.store.reader import read_blocks
from shoal.data.store.splits import list_splits, split_files

DEFAULT_AGE = 24 * 3600.0
"""Seconds after which a file that no version names is taken for left over."""


def find_unreferenced(folder: StoreFolder, *, older_s: float = DEFAULT_AGE) -> list[Entry]:
    """The files that no version names and that were written so long ago.

    Raises:
        RequestError: the store is not on this machine, where ages are known, or there is no store.
    """
    if not isinstance(folder.storage, LocalStorage):
        raise RequestError(
            f"{folder.address} is not on this machine, and its files have no age that can be trusted; delete them there"
        )
    named = set(_named_files(folder))
    found: list[Entry] = []
    for kind in (BLOCKS, PARTS, INDEX, SPLITS, BUILDING):
        for entry in (*folder.storage.list(folder.path(kind)), *_half_written(folder.storage, folder.path(kind))):
            inside = entry.path.removeprefix(folder.path("")).lstrip("/")
            if inside not in named and not (kind == SPLITS and inside.endswith(".json")) and _age(entry) >= older_s:
                found.append(entry)
    return found


def delete_unreferenced(folder: StoreFolder, *, older_s: float = DEFAULT_AGE) -> list[Entry]:
    """Delete them; those that were written anew meanwhile stay.

    Raises:
        RequestError: as for ``find_unreferenced``.
    """
    gone = []
    for entry in find_unreferenced(folder, older_s=older_s):
        try:
            now = folder.storage.stat(entry.path)
        except Missing:
            continue
        if now.version == entry.version:
            folder.storage.delete(entry.path)
            gone.append(entry)
    return gone


def _half_written(storage: LocalStorage, folder: str) -> Iterator[Entry]:
    """Files that a killed process was writing: a listing does not show them, because they are in nobody's place."""
    for path in sorted(storage.local_path(folder).rglob(".*")):
        with contextlib.suppress(Missing):
            yield storage.stat(f"{folder}/{path.relative_to(storage.local_path(folder)).as_posix()}")


def _named_files(folder: StoreFolder) -> Iterator[str]:
    for version in folder.versions():
        # Later versions name everything that earlier ones do, lists of blocks too.
        manifest = folder.manifest(version)
        for part in manifest.parts:
            for ref in part.blocks:
                yield f"{PARTS}/{block_name(ref.digest)}"
            if part.index is not None:
                assert manifest.key is not None
                yield f"{INDEX}/{block_name(part.index.digest)}"
                for ref in PartIndex(folder, part.index, manifest.schema[manifest.key]).refs():
                    yield f"{INDEX}/{block_name(ref.digest)}"
    newest = read_blocks(folder, folder.manifest())
    for number in range(len(newest)):
        yield f"{BLOCKS}/{block_name(newest.digest(number))}"
    for name in list_splits(folder):
        for file in split_files(folder, name):
            yield f"{SPLITS}/{file}"


def _age(entry: Entry) -> float:
    return time.time() - int(entry.version.partition("-")[0]) / 1e9
