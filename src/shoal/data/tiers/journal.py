"""Which blocks are on the disk, agreed among processes: a journal of accesses that each of them replays through its own policy.

Policies are deterministic, so processes that have replayed the same records agree on what is in and what has to go, whatever
policy it is, and none of them has to be asked. Records are appended under one lock; a torn one, of a writer that was killed or
that found the disk full, is cut off by the next. A journal that has grown is written anew, beginning with the blocks that are in.
"""

import os
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from shoal.data.cache.policy import Plannable, Policy

_RECORD = struct.Struct("<16sqBxxxI")
ACCESS, DISCARD, PLAN, FORGET = 1, 2, 3, 4
_NAME = re.compile(r"journal-([0-9]{8})", re.ASCII)
_READ_BYTES = 1 << 20


class Journal:
    """One process's view of the journal in ``folder``. All methods want the journal's lock to be held."""

    def __init__(self, folder: Path, build: Callable[[], Policy], *, most_records: int = 200_000) -> None:
        self._folder, self._build, self._most = folder, build, most_records
        self._generation, self._at = -1, 0
        self._policy = build()
        self.sizes: dict[bytes, int] = {}
        """Blocks that are in, with their sizes."""
        self._pending: set[bytes] = set()

    def catch_up(self) -> list[bytes]:
        """Replay what others have written since; the blocks that have left and may still have a file."""
        newest = max(self._generations(), default=0)
        if newest != self._generation:
            before = set(self.sizes)
            self._generation, self._at = newest, 0
            self._policy, self.sizes = self._build(), {}
            self._replay()
            self._pending |= before - self.sizes.keys()
        else:
            self._replay()
        gone = [key for key in self._pending if key not in self.sizes]
        self._pending.clear()
        return gone

    def append(self, kind: int, keys: Iterable[bytes], size: int = 0) -> None:
        """Write records and replay them.

        Raises:
            OSError: the disk refused; the journal is as it was.
        """
        data = b"".join(_encode(kind, key, size) for key in keys)
        fd = os.open(self._file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = self._at
            try:
                if os.pwrite(fd, data, end) != len(data):
                    raise OSError(28, "the disk is full")
            except OSError:
                os.ftruncate(fd, end)
                raise
        finally:
            os.close(fd)
        self._apply(data)
        self._at += len(data)
        if self._at > self._most * _RECORD.size:
            self._write_anew()

    def _replay(self) -> None:
        try:
            fd = os.open(self._file(), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            while data := os.pread(fd, _READ_BYTES // _RECORD.size * _RECORD.size, self._at):
                whole = self._apply(data)
                self._at += whole
                if whole < len(data):
                    os.ftruncate(fd, self._at)
                    break
        finally:
            os.close(fd)

    def _apply(self, data: bytes) -> int:
        """Replay records; the bytes up to the first that is torn."""
        done = 0
        planned: list[bytes] = []
        while done + _RECORD.size <= len(data):
            key, size, kind, check = _RECORD.unpack_from(data, done)
            if check != _check(key, size, kind):
                break
            done += _RECORD.size
            if kind == PLAN:
                planned.append(key)
                continue
            self._tell(planned)
            if kind == FORGET:
                if isinstance(self._policy, Plannable):
                    self._policy.forget_plan()
                continue
            if kind == DISCARD:
                self._policy.discard(key)
                self.sizes.pop(key, None)
                self._pending.add(key)
                continue
            evicted = self._policy.access(key, size).evicted
            if key in self._policy:
                self.sizes[key] = size
            for victim in evicted:
                assert isinstance(victim, bytes)
                self.sizes.pop(victim, None)
                self._pending.add(victim)
        self._tell(planned)
        return done

    def _tell(self, planned: list[bytes]) -> None:
        if planned and isinstance(self._policy, Plannable):
            self._policy.plan(tuple(planned))
        planned.clear()

    def _write_anew(self) -> None:
        """Begin another generation with what is in; what the policy has learnt of the past is lost."""
        data = b"".join(_encode(ACCESS, key, size) for key, size in self.sizes.items())
        file = self._folder / f"journal-{self._generation + 1:08d}"
        beside = self._folder / ".journal"
        try:
            beside.write_bytes(data)
            os.rename(beside, file)
        except OSError:
            beside.unlink(missing_ok=True)
            return
        self._file().unlink(missing_ok=True)
        gone = self.catch_up()
        self._pending |= set(gone)

    def _generations(self) -> list[int]:
        return [int(match[1]) for name in os.listdir(self._folder) if (match := _NAME.fullmatch(name))]

    def _file(self) -> Path:
        return self._folder / f"journal-{max(0, self._generation):08d}"


def _check(key: bytes, size: int, kind: int) -> int:
    return xxhash.xxh32_intdigest(key, seed=(size * 7 + kind) & 0xFFFFFFFF)


def _encode(kind: int, key: bytes, size: int) -> bytes:
    return _RECORD.pack(key, size, kind, _check(key, size, kind))
