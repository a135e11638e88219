"""The disk tier: blocks as files in a folder that all ranks of a host share.

A block's file appears by a rename, so it is whole or absent as long as the machine runs; after a crash of the machine, or where
the disk has altered it, its digest tells. Nothing is flushed: a cache that has lost a block has lost time. A disk that is full,
or refuses, costs the block and nothing else.
"""

import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import xxhash

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.data.cache.policy import Policy
from shoal.data.tiers.journal import ACCESS, DISCARD, FORGET, PLAN, Journal
from shoal.data.tiers.locks import hold, locked

_HEADER = struct.Struct("<8sq16s")
_MAGIC = b"shoalblk"
_FETCH_LOCKS = 1024
_JOURNAL_SECONDS = 30.0
"""Who holds the journal's lock longer than this is stopped; what it would have been told is left out."""


class Torn(Exception):
    """A block on the disk does not have the bytes that were written."""


class DiskTier:
    """The folder, one process's hand on it."""

    def __init__(self, folder: Path, build: Callable[[], Policy], *, most_records: int = 200_000) -> None:
        self._folder = folder
        try:
            (folder / "blocks").mkdir(parents=True, exist_ok=True)
            (folder / "locks").mkdir(exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"data.cache.path {folder}: {error.strerror or error}; name a folder that can be made"
            ) from error
        self._journal = Journal(folder, build, most_records=most_records)
        self._capacity = build().capacity
        self._lead: int | None = None
        self.refusals = 0
        """Blocks that the disk had no room for, or refused."""
        try:
            with self._journal_lock() as is_held:
                if is_held:
                    self._sweep()
        except OSError:
            # A disk without room for the lock, or a folder of somebody else: blocks are fetched, and that is all.
            self.refusals += 1

    @contextmanager
    def fetching(self, key: bytes, seconds: float) -> Iterator[bool]:
        """Be the one process of the host that fetches this block: True; or False after so many seconds."""
        number = int.from_bytes(key[:4], "little") % _FETCH_LOCKS
        with ExitStack() as stack:
            try:
                lock = locked(self._folder / "locks" / f"{number:04d}", Deadline(seconds=seconds))
                is_held = stack.enter_context(lock)
            except OSError:
                # A disk that has no room for a lock file: everybody fetches for himself.
                self.refusals += 1
                is_held = False
            yield is_held

    def read(self, key: bytes) -> bytes | None:
        """A block that is there; None where it is not.

        Raises:
            Torn: its bytes are not those that were written; the file is gone now.
        """
        file = self._file(key)
        try:
            data = file.read_bytes()
        except OSError:
            return None
        content = data[_HEADER.size :]
        if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (_MAGIC, len(content), _digest(key, content)):
            self.lose(key)
            raise Torn(str(file))
        with suppress(OSError), self._journal_lock() as is_held:
            if is_held:
                self._remove(self._journal.catch_up())
                if key in self._journal.sizes:
                    self._journal.append(ACCESS, [key], self._journal.sizes[key])
        return content

    def has(self, key: bytes) -> bool:
        """True where the block has a file."""
        return self._file(key).exists()

    def put(self, key: bytes, content: bytes) -> bool:
        """Keep a block, where the policy wants it and the disk has room for it; what it displaces goes."""
        size = _HEADER.size + len(content)
        if size > self._capacity:
            return False
        beside = self._folder / "blocks" / f".{secrets.token_hex(8)}"
        try:
            with self._journal_lock() as is_held:
                if not is_held:
                    return False
                self._remove(self._journal.catch_up())
                if key in self._journal.sizes and self.has(key):
                    return True
                if key in self._journal.sizes:
                    self._journal.append(DISCARD, [key])
                self._journal.append(ACCESS, [key], size)
                # What has to leave does so before the new block is written, so the disk never holds more than its limit.
                gone = self._journal.catch_up()
                self._remove(gone)
                if key not in self._journal.sizes:
                    return False
                try:
                    with open(beside, "xb", buffering=0) as file:
                        _write_all(file.fileno(), (_HEADER.pack(_MAGIC, len(content), _digest(key, content)), content))
                    self._file(key).parent.mkdir(exist_ok=True)
                    os.rename(beside, self._file(key))
                except OSError:
                    with suppress(OSError):
                        os.unlink(beside)
                    self._journal.append(DISCARD, [key])
                    raise
        except OSError:
            self.refusals += 1
            return False
        return True

    def lose(self, key: bytes) -> None:
        """Take a block out whose file is wrong."""
        with suppress(OSError):
            self._file(key).unlink(missing_ok=True)
        with suppress(OSError), self._journal_lock() as is_held:
            if is_held:
                self._remove(self._journal.catch_up())
                if key in self._journal.sizes:
                    self._journal.append(DISCARD, [key])

    def plan(self, keys: Sequence[bytes]) -> None:
        """These blocks are asked for next on this host. Of the ranks that say so the first is heard, for as long as it lives."""
        if self._lead is None:
            self._lead = hold(self._folder / "plan")
            if self._lead is not None:
                # What a run that has ended had planned is over.
                self._append(FORGET, [bytes(16)])
        if self._lead is not None:
            self._append(PLAN, keys)

    def _append(self, kind: int, keys: Sequence[bytes]) -> None:
        with suppress(OSError), self._journal_lock() as is_held:
            if is_held:
                self._remove(self._journal.catch_up())
                self._journal.append(kind, keys)

    @property
    def used(self) -> int:
        """Bytes of the blocks that are in, as far as this process has heard."""
        return sum(self._journal.sizes.values())

    @contextmanager
    def _journal_lock(self) -> Iterator[bool]:
        with locked(self._folder / "lock", Deadline(seconds=_JOURNAL_SECONDS)) as is_held:
            yield is_held

    def _sweep(self) -> None:
        """Remove files that no journal knows, and drafts of writers that were killed."""
        self._remove(self._journal.catch_up())
        for file in (self._folder / "blocks").glob("*/*"):
            with suppress(ValueError, OSError):
                if bytes.fromhex(file.name) not in self._journal.sizes:
                    file.unlink()
        for draft in (self._folder / "blocks").glob(".*"):
            with suppress(OSError):
                # Drafts are written under the lock that is held here, so each one is a dead writer's.
                draft.unlink()

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with suppress(OSError):
                self._file(key).unlink(missing_ok=True)

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / "blocks" / name[:2] / name


def _digest(key: bytes, content: bytes | memoryview) -> bytes:
    # The key is part of it: a block under another block's name is refused too.
    found = xxhash.xxh3_128(key)
    found.update(content)
    return found.digest()


def _write_all(fd: int, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]
