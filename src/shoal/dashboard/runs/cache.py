"""What was read of event files, kept in the user's cache folder: a folder of old runs opens in milliseconds.

A file there holds the columns and events of one event file up to some length. It is used only where the event file is the same
one (device, inode, and the bytes before that length) and has not become shorter; it is checked by a hash of all of it. Nothing is
ever written into a run directory, and everything here may be deleted at any time.
"""

import contextlib
import hashlib
import mmap
import os
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from shoal.dashboard.runs.columns import Column, Table
from shoal.dashboard.runs.eventfile import EventFile, Kept, SpanPlace
from shoal.dashboard.runs.files import Identity

_VERSION = 1
_MAGIC = b"shoalc01"
_HEAD = len(_MAGIC) + 16
_MOST_BYTES = 2 << 30
_WORTH_BYTES = 1 << 18
"""What has to be new in a file before it is written again; smaller ones are read as fast as a cache of them."""

_MAPPED_BYTES = 1 << 22


class _TableHead(msgspec.Struct):
    rows: int
    columns: dict[str, str]


class _KeptHead(msgspec.Struct):
    count: int
    first: list[tuple[int, dict[str, Any]]]
    last: list[tuple[int, int, dict[str, Any]]]
    first_bytes: int
    last_bytes: int


class _Head(msgspec.Struct):
    version: int
    device: int
    inode: int
    size: int
    changed: int
    offset: int
    oversized: int
    tail: bytes
    broken: int
    newest: float
    unknown: dict[str, int]
    staleness: dict[str, dict[int, int]]
    spans: list[tuple[int, int, int]]
    kept: dict[str, _KeptHead]
    steps: _TableHead
    tables: dict[str, _TableHead]


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Head).decode


def default_folder() -> Path:
    """Where caches of this user belong."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "dashboard"


class ColumnCache:
    """Caches of event files in one folder.

    Args:
        folder: made when something is kept.
        most_bytes: that all files there may have; the longest unused go first.
    """

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.folder, self._most_bytes = folder, most_bytes
        self._kept_offsets: dict[Path, int] = {}

    def load(self, file: EventFile) -> bool:
        """Let an event file begin where a cache of it ends; False where there is none that may be believed."""
        try:
            status = os.stat(file.path)
            with self._place(file.path, status).open("rb") as opened:
                view = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            os.utime(self._place(file.path, status))
        except (OSError, ValueError):
            return False
        try:
            head, body = _open(view)
            if (head.device, head.inode) != (status.st_dev, status.st_ino) or status.st_size < head.offset:
                return False
            _fill(file, head, body)
        except (ValueError, TypeError, msgspec.MsgspecError):
            return False
        self._kept_offsets[file.path] = head.offset
        return True

    def keep(self, file: EventFile, *, is_last: bool = False) -> bool:
        """Write down what is known of an event file, where that is worth it; a disk that refuses is no failure.

        All of it is written each time, so one that grows is written again when it has become half as long again: of a long run
        all writings together are three times what it has in the end.

        Args:
            file: whose columns.
            is_last: nothing more is to come for a while.

        Returns:
            Whether ``remap`` is worth its while.
        """
        kept = self._kept_offsets.get(file.path, 0)
        worth = _WORTH_BYTES if is_last else max(_WORTH_BYTES, kept // 2)
        # Where the file began anew, what was kept is of another.
        if file.refused or file.cursor.is_skipping or 0 <= file.cursor.offset - kept < worth:
            return False
        if file.cursor.offset < _WORTH_BYTES:
            return False
        self._kept_offsets[file.path] = file.cursor.offset
        beside = self.folder / f".{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.stat(file.path)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                _write(opened, file)
            os.replace(beside, self._place(file.path, status))
            self._make_room()
            return file.cursor.offset > _MAPPED_BYTES
        except (OSError, OverflowError):
            # Also for a whole number of a strange event that has more than 64 bits.
            with contextlib.suppress(OSError):
                beside.unlink()
            return False

    def remap(self, file: EventFile) -> None:
        """Let the columns of a file that was just kept be pages of its cache. The tables stay the same for who knows them."""
        steps, tables, offset = file.steps, file.tables, file.cursor.offset
        if not self.load(file) or file.cursor.offset != offset:
            return
        steps.rebase(file.steps.arrays())
        file.steps = steps
        for kind, table in tables.items():
            if kind in file.tables:
                table.rebase(file.tables[kind].arrays())
                file.tables[kind] = table

    def _place(self, path: Path, status: os.stat_result) -> Path:
        name = f"{status.st_dev}:{status.st_ino}:{os.path.realpath(path)}"
        return self.folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:40]}.columns"

    def _make_room(self) -> None:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".columns"):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most_bytes:
                return
            os.unlink(path)
            total -= size


def _open(view: memoryview) -> tuple[_Head, memoryview]:
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("no cache of ours")
    length = int.from_bytes(view[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if xxhash.xxh3_64_intdigest(view[_HEAD:]) != int.from_bytes(view[len(_MAGIC) + 8 : _HEAD], "little"):
        raise ValueError("it was altered")
    head = _decode(view[_HEAD : _HEAD + length])
    if head.version != _VERSION:
        raise ValueError("of another version")
    return head, view[_HEAD + length + -(_HEAD + length) % 8 :]


def _fill(file: EventFile, head: _Head, body: memoryview) -> None:
    at = 0

    def take(table: _TableHead) -> Table:
        nonlocal at
        arrays: dict[str, Column] = {}
        for name, dtype in table.columns.items():
            kind = np.dtype(dtype)
            if kind.hasobject or kind.itemsize > 8:
                raise ValueError("no column of ours")
            arrays[name] = np.frombuffer(body, kind, table.rows, at)
            at += -(-kind.itemsize * table.rows // 8) * 8
        return Table.of(arrays, table.rows)

    steps = take(head.steps)
    tables = {kind: take(table) for kind, table in head.tables.items()}
    file.steps, file.tables = steps, tables
    file.broken, file.newest, file.unknown = head.broken, head.newest, Counter(head.unknown)
    file.staleness = {worker: Counter(counts) for worker, counts in head.staleness.items()}
    file.spans = [SpanPlace(*place) for place in head.spans]
    file.kept = {
        kind: Kept(one.count, list(one.first), deque(one.last), one.first_bytes, one.last_bytes)
        for kind, one in head.kept.items()
    }
    cursor = file.cursor
    cursor.offset, cursor.oversized, cursor.tail = head.offset, head.oversized, head.tail
    # Its size is that of the last look, so that what was written since is seen.
    cursor.identity = Identity(head.device, head.inode, head.size, head.changed)


def _write(opened: Any, file: EventFile) -> None:
    arrays: list[Column] = []

    def describe(table: Table) -> _TableHead:
        columns: Mapping[str, Column] = table.arrays()
        arrays.extend(columns.values())
        return _TableHead(table.rows, {name: values.dtype.str for name, values in columns.items()})

    cursor = file.cursor
    head = _encode(
        _Head(
            version=_VERSION,
            device=cursor.identity.device,
            inode=cursor.identity.inode,
            size=cursor.identity.size,
            changed=cursor.identity.changed,
            offset=cursor.offset,
            oversized=cursor.oversized,
            tail=cursor.tail,
            broken=file.broken,
            newest=file.newest,
            unknown=dict(file.unknown),
            staleness={worker: dict(counts) for worker, counts in file.staleness.items()},
            spans=[(place.step, place.start, place.length) for place in file.spans],
            kept={
                kind: _KeptHead(one.count, one.first, list(one.last), one.first_bytes, one.last_bytes)
                for kind, one in file.kept.items()
            },
            steps=describe(file.steps),
            tables={kind: describe(table) for kind, table in file.tables.items()},
        )
    )
    opened.write(bytes(_HEAD))
    digest = xxhash.xxh3_64()

    def put(data: Any) -> None:
        digest.update(data)
        opened.write(data)

    put(head)
    put(bytes(-(_HEAD + len(head)) % 8))
    for values in arrays:
        if not values.nbytes:
            continue
        put(np.ascontiguousarray(values).data.cast("B"))
        put(bytes(-values.nbytes % 8))
    opened.seek(0)
    opened.write(_MAGIC + len(head).to_bytes(8, "little") + digest.intdigest().to_bytes(8, "little"))
