"""The store in which ranks of one host meet when any of them may be killed at any moment: records in a file.

torch's own ``FileStore`` writes a record in four parts and reads it without looking for the end of the file: a rank that is
killed between two of them leaves half a record, over which every other rank loops for ever, in C++ and with the interpreter's
lock. Here a record has its length and its check sum in front; who reads goes on only over records that are whole, and who writes
cuts off what is left of one that is not.

    lengths of key and value, check sum | key | value
    12 bytes                            |     |

Waits end when there is a reason to wait no longer (``comm/interruption.py``): a key of a rank that died is set by nobody.
"""

import contextlib
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import reason_to_stop
from shoal.comm.store.file import NAME
from shoal.core.clock import Deadline
from shoal.core.errors import RunError

_HEAD = struct.Struct("<III")
_DELETED = 0xFFFFFFFF
_LOOK_SECONDS = 0.002


class RecordFileStore(Store):
    """The keys in a file that several processes have opened.

    Args:
        path: of the file; it may be ``/proc/PID/fd/N``. It stays open for as long as this store lives.

    Raises:
        RunError: the number is another file's by now: nothing is written to that.
    """

    timeout: timedelta
    """How long keys are waited for; torch's own, which ``set_timeout`` sets."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        # Its own opening of the file: locks belong to that.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if path.startswith("/proc/") and NAME not in (found := os.readlink(f"/proc/self/fd/{self._file}")):
            raise RunError(f"{path} was where ranks met, and is {found} by now: there are newer views")
        self._offset = 0
        self._values: dict[str, bytes] = {}
        self._mutex = threading.Lock()

    def __del__(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with self._locked():
            self._write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, waited for as long as the store's timeout says."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a key that is a number, 0 where it is not there; the sum."""
        with self._locked():
            total = int(self._values.get(key, b"0")) + value
            self._write(key, b"%d" % total)
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it is what is expected, or if it is not there and nothing is expected; what it is then."""
        with self._locked():
            found, wanted = self._values.get(key), _bytes(expected_value)
            if found == wanted or (found is None and not wanted):
                self._write(key, _bytes(desired_value))
            return self._values.get(key, wanted)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        with self._mutex:
            self._read()
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            PeerLost: there is a reason to wait no longer, or they did not come in time.
        """
        limit = Deadline(seconds=(timeout or self.timeout).total_seconds())
        while not self.check(keys):
            _look_around(limit, f"{' and '.join(map(repr, keys))} were not set")
            time.sleep(_LOOK_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Delete a key; False where it was not there."""
        with self._locked():
            was_there = key in self._values
            if was_there:
                self._write(key, None)
        return was_there

    def num_keys(self) -> int:
        """How many keys there are."""
        self.check([])
        return len(self._values)

    def clone(self) -> "RecordFileStore":
        """Another way to the same keys."""
        made = RecordFileStore(self._path)
        made.set_timeout(self.timeout)
        return made

    # By these names torch's own C++ code calls a store that is written in Python.
    deleteKey = delete_key
    getNumKeys = num_keys

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """With everything read, and nobody else writing. The lock of a process that is killed is free at once; one that is
        stopped keeps it, and nobody waits for that one for ever."""
        with self._mutex:
            limit = Deadline(seconds=self.timeout.total_seconds())
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    _look_around(limit, "the ranks' store was not free")
                    time.sleep(_LOOK_SECONDS)
            try:
                self._read()
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> None:
        """Take in the whole records that came since the last time."""
        size = os.fstat(self._file).st_size
        if size == self._offset:
            return
        data = os.pread(self._file, size - self._offset, self._offset)
        start = 0
        while (record := _parse(data, start)) is not None:
            key, value, start = record
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        self._offset += start

    def _write(self, key: str, value: bytes | None) -> None:
        # What lies behind the last whole record was left by one that was killed while it wrote.
        os.ftruncate(self._file, self._offset)
        name, content = key.encode(), value or b""
        length = _DELETED if value is None else len(content)
        record = _HEAD.pack(len(name), length, zlib.crc32(name + content)) + name + content
        written = 0
        while written < len(record):
            written += os.pwrite(self._file, record[written:], self._offset + written)
        self._read()


def _parse(data: bytes, start: int) -> tuple[str, bytes | None, int] | None:
    """A record and where the next one begins; None where it is not whole."""
    if len(data) < start + _HEAD.size:
        return None
    num_key, num_value, check_sum = _HEAD.unpack_from(data, start)
    begin, is_deleted = start + _HEAD.size, num_value == _DELETED
    end = begin + num_key + (0 if is_deleted else num_value)
    if len(data) < end or zlib.crc32(data[begin:end]) != check_sum:
        return None
    return data[begin : begin + num_key].decode(), None if is_deleted else data[begin + num_key : end], end


def _look_around(limit: Deadline, late: str) -> None:
    if (reason := reason_to_stop()) is not None:
        raise PeerLost(f"{reason}, and {late} so far", ranks=[])
    if limit.is_over:
        raise PeerLost(f"{late} within {limit.seconds:g} s", ranks=[])


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
