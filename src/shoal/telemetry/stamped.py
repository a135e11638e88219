"""Lines with the time in front, for logs of processes that run for days on machines of their own.

A person at a terminal sees when a line comes; who reads a file afterwards must be told, and compares files of several machines.
"""

import io
import time
from collections.abc import Callable
from typing import TextIO


class StampedStream(io.TextIOBase):
    """A text stream that writes the local time, with its offset from UTC, in front of every line.

    Args:
        stream: where the lines go.
        now: makes the time's text.
    """

    def __init__(self, stream: TextIO, now: Callable[[], str] = lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z")) -> None:
        self._stream, self._now = stream, now
        self._begins_line = True

    def write(self, text: str) -> int:
        """Write a text, which may hold several lines or a part of one."""
        stamp = f"{self._now()} "
        lines = text.splitlines(keepends=True)
        for line in lines:
            self._stream.write(stamp + line if self._begins_line else line)
            self._begins_line = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what was written."""
        self._stream.flush()

    def fileno(self) -> int:
        """Of the stream behind it."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """False: nobody draws on a log."""
        return False

    def writable(self) -> bool:
        """True."""
        return True
