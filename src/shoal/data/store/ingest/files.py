"""A folder as a source that grows: every new file in it is taken in once, whole, when it has stopped changing.

A writer that renames its files into the folder, or begins their names with a dot while it writes, is never read too early; of
others a file is taken when every look has found it alike for a time. Looks are several in that time, so that a file waits for
little more than it, and take a part of a processor at most. What a file was is kept with the rows, one entry for a file, so a
store knows what it has taken in whoever looks.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.errors import RequestError
from shoal.data.formats.files import DataFile, find_files
from shoal.data.formats.opening import open_files
from shoal.data.formats.options import ReadOptions
from shoal.data.storage.local import LocalStorage
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import Missing
from shoal.data.store.ingest.arrivals import Arrived
from shoal.data.table import Schema

MOST_BYTES = 1 << 30
"""Of the files of one version, unless one alone is larger."""
_LOOKS = 4
"""In the time that a file must stay as it is."""
_PAUSES = 4
"""A pause is so many times as long as the look before it, or longer."""


@dataclass(frozen=True)
class Seen:
    """A file at one look."""

    size: int
    version: str


@dataclass(frozen=True)
class Unchanged:
    """A file, and the time of the first look that found it like this."""

    seen: Seen
    since: float


def key_of(address: str, inside: str) -> str:
    """Under which a store keeps that a file was taken in."""
    return f"file {address.rstrip('/')} {inside}"


def watched(now: Mapping[str, Seen], before: Mapping[str, Unchanged], at: float) -> dict[str, Unchanged]:
    """Since when each file is as it is now."""
    return {
        name: before[name] if name in before and before[name].seen == seen else Unchanged(seen, at)
        for name, seen in now.items()
    }


def settled(files: Mapping[str, Unchanged], at: float, seconds: float) -> list[str]:
    """The files that have been as they are for so long, in the order of their names."""
    return sorted(name for name, file in files.items() if at - file.since >= seconds)


def pause_of(files: Mapping[str, Unchanged], at: float, seconds: float, look_s: float) -> float:
    """Until the next look: a part of the time that files take to settle, or until the first one that is waited for has."""
    usual = min(seconds, max(seconds / _LOOKS, look_s * _PAUSES))
    left = min((file.since + seconds - at for file in files.values()), default=usual)
    return max(0.0, min(usual, left))


def first_bytes(names: list[str], sizes: Mapping[str, int], most: int) -> list[str]:
    """The first of some files, of so many bytes together at most; one at least."""
    chosen: list[str] = []
    total = 0
    for name in names:
        total += sizes[name]
        if chosen and total > most:
            break
        chosen.append(name)
    return chosen


class FolderArrivals:
    """Watches a folder.

    Args:
        address: of the folder.
        format: of its files; by their names when left out.
        pattern: which of its files.
        options: how they are read.
        warn: told of a file that changed after it was taken in.

    Raises:
        RequestError: there is no such folder on this machine; of another's storage an empty one cannot be told from none.
    """

    def __init__(
        self,
        address: str,
        *,
        format: str | None = None,
        pattern: str | None = None,
        options: ReadOptions | None = None,
        warn: Any = None,
    ) -> None:
        storage, path = open_storage(address)
        if isinstance(storage, LocalStorage) and not storage.local_path(path).is_dir():
            raise RequestError(f"{address} is no folder; make it, or name the one that files arrive in")
        self._address, self._format, self._pattern = address, format, pattern
        self._options, self._warn = options or ReadOptions(), warn or (lambda text: None)
        self._new: dict[str, Unchanged] = {}
        self._told: set[str] = set()
        self._pause = threading.Event()

    def look(self, taken: Mapping[str, Any], schema: Schema | None, seconds: float) -> Arrived | None:
        """See ``Arrivals``; a file must stay as it is for these seconds."""
        began = time.monotonic()
        found = {
            file.inside: file
            for file in find_files(self._address, self._pattern, self._options.storage, may_be_empty=True)
        }
        new = {}
        for inside, file in found.items():
            try:
                version = file.storage.stat(file.path).version
            except Missing:
                continue  # It was moved away since it was listed.
            was = taken.get(key_of(self._address, inside))
            if was is None:
                new[inside] = Seen(file.num_bytes, version)
            elif was != file.num_bytes and inside not in self._told:
                self._told.add(inside)
                self._warn(
                    f"{file.name} had {was} bytes when it was taken in and has {file.num_bytes} now; what was added to it is not "
                    "read: write new rows into new files"
                )
        self._new = watched(new, self._new, began)
        ready = settled(self._new, began, seconds)
        if not ready:
            done = time.monotonic()
            self._pause.wait(pause_of(self._new, done, seconds, done - began))
            return None
        chosen = first_bytes(ready, {name: seen.size for name, seen in new.items()}, MOST_BYTES)
        return self._read([found[name] for name in chosen], schema)

    def _read(self, files: list[DataFile], schema: Schema | None) -> Arrived:
        opened = open_files(files, format=self._format, options=replace(self._options, like=schema))
        keys = {key_of(self._address, file.inside): file.num_bytes for file in files}
        what = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more files"
        if schema is not None and opened.schema != schema:
            raise RequestError(
                f"{what}: its columns are {_say(opened.schema)}, and the store has {_say(schema)}; write them alike, or begin "
                "another store"
            )
        return Arrived(
            tables=opened.tables(),
            schema=opened.schema,
            offsets=keys,
            after=dict.fromkeys(keys),
            what=what,
        )

    def close(self) -> None:
        """See ``Arrivals``."""
        self._pause.set()


def _say(schema: Schema) -> str:
    return ", ".join(f"{field.name} {field.kind.lstrip('<|')}" for field in schema.fields)
