"""Payloads in memory that processes of one machine share: the bytes are put there once, and only their place crosses.

An arena is a file in a folder in memory (under /dev/shm), mapped by its owner and by every process that is sent a place in it.
It holds one payload at a time, and the rules that make that safe are few:

- A payload is **lent** to the receiver until the receiver says that nothing there refers to it any more. Only then is the arena
  used again, so a receiver may keep a payload for as long as it likes without copying it.
- When that word does not come (a call timed out, the receiver died), the arena is **abandoned**: its file is removed and its name
  never used again. Who has mapped it keeps what was in it; who has not finds nothing. Nobody ever reads bytes of another message.
- The owner holds a lock on each file, which the kernel frees with the process: ``sweep_arenas`` removes files that nobody locks.

Where memory is short, the folder is missing, or encryption was asked for, payloads cross inside their messages, as they do
between machines.
"""

import asyncio
import fcntl
import mmap
import os
import re
import stat
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.comm.wire.buffers import PIECE_BYTES, copy, see
from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import Place
from shoal.core.errors import RequestError

SHARED_BYTES = 64 * 1024
"""A shorter payload crosses inside its message."""
ARENA_BYTES = 4 << 30
"""What one process lends and keeps for reuse at most; above it payloads cross inside their messages."""
LENT_SECONDS = 60.0
"""An arena that did not come back in this time is abandoned."""
_GRAIN = 256 * 1024
_MAPPED = 256
"""Arenas of others that are kept mapped."""
_SUFFIX = ".arena"
_NAME = re.compile(r"(?P<owner>[A-Za-z0-9_-]{1,64})-[0-9]{1,12}\.arena")
_MAKING = ".making"
_MAKING_SECONDS = 60.0


@dataclass(eq=False, kw_only=True)
class _Arena:
    """A file of this process, locked and mapped."""

    path: Path
    descriptor: int
    memory: mmap.mmap
    num_bytes: int
    num_reserved: int = 0
    receiver: object = None
    since: float = 0.0

    async def fill(self, payload: memoryview) -> bool:
        """Copy a payload here in pieces, between which others run; False when memory is short."""
        target = memoryview(self.memory)
        for at in range(0, payload.nbytes, PIECE_BYTES):
            if at:
                await asyncio.sleep(0)
            end = min(at + PIECE_BYTES, payload.nbytes)
            if end > self.num_reserved:
                # Asked for before it is written: a page that cannot be had then is a bus error, which ends the process.
                try:
                    os.posix_fallocate(self.descriptor, at, end - at)
                except OSError:
                    return False
                self.num_reserved = end
            copy(payload[at:end], target[at:end])
        return True

    def remove(self) -> None:
        """Remove the file. Who has mapped it keeps what is in it."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


class Arenas:
    """What this process lends."""

    def __init__(self, folder: Path, instance_id: str, *, max_bytes: int = ARENA_BYTES) -> None:
        self._folder = folder
        self._instance_id = instance_id
        self._max_bytes = max_bytes
        self._num_made = 0
        self._num_bytes = 0
        self._free: list[_Arena] = []
        self._lent: dict[int, _Arena] = {}
        self._is_closed = False

    @property
    def num_lent(self) -> int:
        """Payloads that have not come back."""
        return len(self._lent)

    async def put(self, payload: memoryview, sequence: int, receiver: object) -> Place | None:
        """Copy a payload into an arena and lend it to the receiver of message ``sequence``; None where memory is short."""
        arena = self._take_free(payload.nbytes) or self._make(payload.nbytes)
        if arena is None:
            return None
        is_filled = False
        try:
            is_filled = await arena.fill(payload)
        finally:
            # Not filled: there is no room, or the caller was cancelled in the middle.
            if not is_filled or self._is_closed:
                self._drop(arena)
        if not is_filled or self._is_closed:
            return None
        arena.receiver, arena.since = receiver, time.monotonic()
        self._lent[sequence] = arena
        return Place(arena.path.name, 0, payload.nbytes)

    def give_back(self, sequence: int, name: str, receiver: object) -> bool:
        """The receiver of message ``sequence`` does not need its payload any more; False when nothing was lent to it.

        Args:
            sequence: of the message.
            name: the arena's: a word that was meant for an earlier process on this address has another.
            receiver: the one that says so.
        """
        arena = self._lent.get(sequence)
        if arena is None or arena.receiver != receiver or arena.path.name != name:
            return False
        del self._lent[sequence]
        arena.receiver = None
        self._free.append(arena)
        return True

    def abandon(self, sequence: int) -> None:
        """Whether message ``sequence`` is still read cannot be known."""
        arena = self._lent.pop(sequence, None)
        if arena is not None:
            self._drop(arena)

    def close(self) -> None:
        """Remove every file."""
        self._is_closed = True
        for arena in [*self._lent.values(), *self._free]:
            self._drop(arena)
        self._lent.clear()
        self._free.clear()

    def _drop(self, arena: _Arena) -> None:
        self._num_bytes -= arena.num_bytes
        arena.remove()

    def _take_free(self, num_bytes: int) -> _Arena | None:
        overdue = time.monotonic() - LENT_SECONDS
        for sequence in [sequence for sequence, arena in self._lent.items() if arena.since < overdue]:
            self.abandon(sequence)
        # The smallest that fits; a much larger one is left for a payload of its size.
        fitting = [arena for arena in self._free if num_bytes <= arena.num_bytes <= 2 * num_bytes + _GRAIN]
        if not fitting:
            return None
        best = min(fitting, key=lambda arena: arena.num_bytes)
        self._free.remove(best)
        return best

    def _make(self, num_bytes: int) -> _Arena | None:
        size = -(-num_bytes // _GRAIN) * _GRAIN
        while self._free and self._num_bytes + size > self._max_bytes:
            self._drop(self._free.pop(0))
        if self._is_closed or self._num_bytes + size > self._max_bytes:
            return None
        self._num_made += 1
        arena = _make_arena(self._folder / f"{self._instance_id}-{self._num_made}{_SUFFIX}", size)
        if arena is not None:
            self._num_bytes += size
        return arena


class Borrowed:
    """Arenas of others, mapped when the first place in them arrives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: OrderedDict[str, mmap.mmap] = OrderedDict()

    def view(self, place: Place, sender: str, on_taken: Callable[[], None] | None) -> memoryview:
        """The payload at a place; ``on_taken`` is called, by any thread, when nothing refers to it any more.

        Raises:
            Dropped: ``place``.
        """
        match = _NAME.fullmatch(place.name)
        if match is None or match["owner"] != sender:
            raise Dropped("place", f"{place.name!r} is no arena of {sender}")
        memory = self._mapped.get(place.name)
        if memory is None:
            self._prune()
            memory = self._mapped[place.name] = _map_file(self._folder / place.name, place)
        self._mapped.move_to_end(place.name)
        if place.offset + place.num_bytes > len(memory):
            text = f"bytes {place.offset} to {place.offset + place.num_bytes} of an arena of {len(memory)}"
            raise Dropped("place", text)
        # An array, because it can be watched; whatever is made of the view keeps the array, and the array the mapping.
        array = np.frombuffer(memory, np.uint8, place.num_bytes, place.offset)
        if on_taken is not None:
            weakref.finalize(array, on_taken).atexit = False
        return see(array)

    def forget(self, sender: str) -> None:
        """Let go of the arenas of an instance that is gone."""
        for name in [name for name in self._mapped if name.startswith(f"{sender}-")]:
            del self._mapped[name]

    def close(self) -> None:
        """Let go of all; what is still referred to stays."""
        self._mapped.clear()

    def _prune(self) -> None:
        gone = [name for name in self._mapped if not (self._folder / name).exists()]
        for name in gone:
            del self._mapped[name]
        while len(self._mapped) >= _MAPPED:
            self._mapped.popitem(last=False)


def identify_folder(folder: Path) -> str:
    """A name for the folder that only those have who see the same one.

    Raises:
        RequestError: it does not exist, or others can write there.
    """
    try:
        found = folder.stat()
    except OSError as error:
        raise RequestError(f"cannot use {folder} for arenas: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise RequestError(f"{folder} is no folder that only you can write to; make one with mode 0700 for arenas")
    return f"{found.st_dev}:{found.st_ino}"


def sweep_arenas(folder: Path) -> list[str]:
    """Remove the arenas whose owner is dead, however it died; their names. A folder that is gone is clean."""
    removed = []
    for path in sorted([*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*{_SUFFIX}{_MAKING}")]):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            # One that is being made is not locked for a moment.
            is_fresh = path.name.endswith(_MAKING) and time.time() - os.fstat(descriptor).st_mtime < _MAKING_SECONDS
            if not is_fresh and _try_lock(descriptor):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        finally:
            os.close(descriptor)
    return removed


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _make_arena(path: Path, size: int) -> _Arena | None:
    """A locked file, which has its final name only then; None where none can be made."""
    making = path.with_name(path.name + _MAKING)
    try:
        descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        making.rename(path)
    except OSError:
        os.close(descriptor)
        making.unlink(missing_ok=True)
        return None
    return _Arena(path=path, descriptor=descriptor, memory=memory, num_bytes=size)


def _map_file(path: Path, place: Place) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Dropped("place", f"{place.name}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Dropped("place", f"{place.name} is no file that only this user can use")
        if place.offset + place.num_bytes > found.st_size:
            text = f"bytes {place.offset} to {place.offset + place.num_bytes} of an arena of {found.st_size}"
            raise Dropped("place", text)
        return mmap.mmap(descriptor, found.st_size)
    finally:
        os.close(descriptor)
