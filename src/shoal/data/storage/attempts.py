"""Requests that are made again when they fail, and reads that go on at the byte they had reached."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shoal.core.clock import Deadline
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import Unreachable, join, truncated

Result = TypeVar("Result")
_LONGEST_PAUSE = 5.0


class Transient(Exception):
    """A request failed in a way that may pass."""


@dataclass
class Calls:
    """What a storage was asked, and how often it failed."""

    requests: int = 0
    retries: int = 0
    bytes_read: int = 0
    pause_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """An answer that is being read."""

    size: int
    """Of the whole file."""
    version: str
    """Of the file; empty where the store says nothing."""
    chunks: Iterator[bytes]
    """From the byte that was asked for on; raises ``Transient`` where it breaks off."""


class Attempts:
    """Makes requests to one store, again where they fail, within the deadline of its settings."""

    def __init__(self, address: str, settings: StorageConfig) -> None:
        self._address, self._settings = address, settings
        self.calls = Calls()

    def run(self, what: str, path: str, action: Callable[[], Result]) -> Result:
        """What ``action`` returns, once it does not raise ``Transient``.

        Raises:
            Unreachable: it failed until the deadline or the last retry; names what was done and for how long.
        """
        deadline = Deadline(seconds=self._settings.deadline)
        failed = 0
        while True:
            self.calls.requests += 1
            try:
                return action()
            except Transient as error:
                failed += 1
                self._pause(what, path, deadline, failed, error)

    def read(self, path: str, start: int, end: int | None, ask: Callable[[int, int | None], Part]) -> bytes:
        """Exactly these bytes; ``ask`` requests them from a byte on. A file that changes on the way is read anew.

        Raises:
            Truncated: the file ends before ``end``.
            Unreachable: it broke off until the deadline, or so often in a row without another byte.
        """
        deadline = Deadline(seconds=self._settings.deadline)
        content, version, failed = bytearray(), None, 0
        while True:
            self.calls.requests += 1
            reached = len(content)
            try:
                part = ask(start + reached, end)
                if version is not None and part.version != version:
                    content.clear()
                    version = None
                    raise Transient("the file changed while it was read")
                version = part.version
                until = part.size if end is None else end
                if until > part.size or start > part.size:
                    raise truncated(self._address, path, max(start, until), part.size)
                for chunk in part.chunks:
                    if not content and len(chunk) == until - start:
                        # All of it at once, which need not be copied.
                        self.calls.bytes_read += len(chunk)
                        return bytes(chunk)
                    content += chunk
                    self.calls.bytes_read += len(chunk)
                    if len(content) > until - start:
                        break
                    if deadline.is_over:
                        raise Transient("it is too slow")
                if len(content) == max(0, until - start):
                    return bytes(content)
                if len(content) > until - start:
                    del content[until - start :]
                    return bytes(content)
                raise Transient(f"the answer ended after {len(content)} of {until - start} bytes")
            except Transient as error:
                # A read that moves on is not given up, however often it breaks off.
                failed = 1 if len(content) > reached else failed + 1
                self._pause("reading", path, deadline, failed, error)

    def _pause(self, what: str, path: str, deadline: Deadline, failed: int, error: Exception) -> None:
        settings = self._settings
        if failed > settings.retries or deadline.is_over:
            took = time.monotonic() - deadline.started
            raise Unreachable(
                f"{join(self._address, path)}: {what} failed for {took:.1f} s and {failed} times in a row, at last with: "
                f"{error}; the store is away or overloaded",
                address=self._address,
                path=path,
            ) from error
        self.calls.retries += 1
        pause = min(settings.backoff * 2 ** (failed - 1), _LONGEST_PAUSE, deadline.remaining)
        self.calls.pause_seconds += pause
        time.sleep(pause)
