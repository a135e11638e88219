"""What ranks print: split into lines, made safe for a terminal, kept in a file.

A rank may print anything: no newline for ever, one line of a gigabyte, binary bytes, escape sequences that would garble the
display. Nothing of it may block the supervisor, fill its memory or stop it. The log file gets the bytes as they came.
"""

import re
from collections import deque
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 64 * 1024
"""A longer line is cut into lines of this length."""
TAIL_LINES = 60
_STACK_LINES = 500
_SHOWN_CHARACTERS = 4096
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LineSplitter:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their newlines."""
        *ended, rest = data.split(b"\n")
        if ended:
            ended[0] = self._take() + ended[0]
        self._parts.append(rest)
        self._held += len(rest)
        if self._held >= MAX_LINE_BYTES:
            ended.append(self._take())
        return [piece for line in ended for piece in _cut(line)]

    def finish(self) -> list[bytes]:
        """What is left when no more will come."""
        rest = self._take()
        return _cut(rest) if rest else []

    def _take(self) -> bytes:
        held = b"".join(self._parts)
        self._parts, self._held = [], 0
        return held


class Log:
    """The file with one rank's output. When the disk refuses, the log ends there and the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Why nothing more is written; empty while all is well."""
        self._file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self.problem = str(error)

    def write(self, lines: list[bytes]) -> None:
        """Append lines."""
        if self._file is None or not lines:
            return
        try:
            self._file.write(b"\n".join(lines) + b"\n")
        except OSError as error:
            self.problem = str(error)
            self.close()

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None


class RankStream:
    """One of the two streams of a rank, from its pipe to the log and to the lines that are shown."""

    def __init__(self, log: Log, prefix: str) -> None:
        self._log = log
        self._prefix = prefix
        self._splitter = LineSplitter()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> str:
        """The last lines, without prefix."""
        return "\n".join(self._tail)

    def expect_stacks(self) -> None:
        """Begin a new tail: what comes next is what matters, and more than the last lines of it."""
        self._tail = deque(maxlen=_STACK_LINES)

    def feed(self, data: bytes) -> str | None:
        """Take bytes; returns whole lines to show, or None."""
        return self._take(self._splitter.feed(data))

    def finish(self) -> str | None:
        """Take the end of the stream; returns the last line to show when it had no newline."""
        return self._take(self._splitter.finish())

    def _take(self, lines: list[bytes]) -> str | None:
        if not lines:
            return None
        self._log.write(lines)
        shown = [clean(line) for line in lines]
        self._tail.extend(shown)
        return "\n".join(self._prefix + line for line in shown)


def clean(line: bytes) -> str:
    """A line as a terminal can show it: what a carriage return overwrote is gone, and control characters are spelled out."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")
    text = _ESCAPE_SEQUENCE.sub("", text)
    text = _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]} ... ({len(text)} characters, see the log)"
    return text


def _cut(line: bytes) -> list[bytes]:
    if len(line) <= MAX_LINE_BYTES:
        return [line]
    return [line[start : start + MAX_LINE_BYTES] for start in range(0, len(line), MAX_LINE_BYTES)]
