"""The status board: a page of shared memory on which every rank writes where it is, and which the supervisor reads.

A rank writes with plain stores: no lock, no system call, no message, so writing "step 12, backward" costs under a microsecond and
can never block training. The board outlives the rank: after ``kill -9`` it still says in which step and phase the rank died.

The memory is a file without a name, handed to the ranks as a file descriptor, so nothing is left behind by any death. Each rank
status has one writer. Text is guarded by a sequence number that is odd while it is being written; a reader that meets an odd or a
changed number tries again a few times and then takes the text that is there and no metrics: the rank may have been killed.

    heartbeat | step | phase sequence | pid | metrics sequence | metrics length | final status | stop signal | phase | metrics
    8 bytes   | 8    | 8              | 8   | 8                | 8              | 8            | 8           | 80    | 4096

A rank's final status is here too (``finish``). An exit code of 0 proves nothing: any library can call ``os._exit(0)`` in the
middle of a step. A rank that has not written a final status has not finished.
"""

import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from shoal.core.errors import RunError

METRICS_BYTES = 4096
_PHASE_BYTES = 80
_HEADER_WORDS = 8
_HEADER_BYTES = 8 * _HEADER_WORDS
_STATUS_BYTES = _HEADER_BYTES + _PHASE_BYTES + METRICS_BYTES
_HEARTBEAT, _STEP, _PHASE_SEQ, _PID, _METRICS_SEQ, _METRICS_LENGTH, _FINAL_STATUS, _STOP_SIGNAL = range(_HEADER_WORDS)
_READ_TRIES = 8

FinalStatus = Literal["", "completed", "interrupted"]
"""How a rank ended; empty until it has."""
_WORDS: tuple[FinalStatus, ...] = ("", "completed", "interrupted")


@dataclass(frozen=True, kw_only=True)
class StatusReading:
    """What one rank last wrote."""

    rank: int
    pid: int = 0
    """0 until the rank has attached."""
    heartbeat: float | None = None
    """Monotonic time of the last beat in seconds; None until the first."""
    step: int = 0
    phase: str = ""
    phase_count: int = 0
    """Phases entered so far; a rank whose count stands still makes no progress, however well its heart beats."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    final_status: FinalStatus = ""
    stop_signal: int = 0
    """The signal by which it was asked to stop; 0 when it was not."""


class RankStatus:
    """One rank's part of the status board. One process writes it, any number read it."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self.rank = rank
        self._memory = memory
        start = rank * _STATUS_BYTES
        self._words = memoryview(memory)[start : start + _HEADER_BYTES].cast("q")
        self._phase_at = start + _HEADER_BYTES
        self._metrics_at = self._phase_at + _PHASE_BYTES
        self._encoded: dict[str, bytes] = {}
        self._owner = 0

    def claim(self) -> None:
        """Make this process the writer, after a first heartbeat: a reader of its pid must not find an older heartbeat."""
        self.beat()
        # The process before it wrote its own.
        self._words[_FINAL_STATUS] = self._words[_STOP_SIGNAL] = 0
        self._words[_PID] = self._owner = os.getpid()

    def beat(self) -> None:
        """Say that this process runs."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def enter(self, phase: str, step: int) -> None:
        """Say that a phase begins. Phases in which a rank waits for others are named ``wait: <operation>``.

        Raises:
            RunError: this is a fork of the process that claimed this status, and goes on as if it were that one.
        """
        if self._owner and os.getpid() != self._owner:
            raise RunError(
                f"process {os.getpid()} is a fork of rank {self.rank} (process {self._owner}) that was let return into training; "
                f"end it where it was forked, with os._exit"
            )
        encoded = self._encoded.get(phase)
        if encoded is None:
            encoded = self._encoded[phase] = _pad(phase)
        words = self._words
        words[_PHASE_SEQ] += 1
        words[_STEP] = step
        self._memory[self._phase_at : self._phase_at + _PHASE_BYTES] = encoded
        words[_PHASE_SEQ] += 1

    def finish(self, final_status: FinalStatus, *, stop_signal: int = 0) -> None:
        """Write how this process ended. A fork of the process that comes this far writes nothing.

        Args:
            final_status: whether all was done, or it stopped in order because it was asked to.
            stop_signal: the signal that asked it.
        """
        if self._words[_PID] == os.getpid():
            self._words[_STOP_SIGNAL] = stop_signal
            self._words[_FINAL_STATUS] = _WORDS.index(final_status)

    def publish(self, metrics: Mapping[str, Any]) -> bool:
        """Show these metrics in place of the last ones; False when they do not fit, which is no reason to stop training."""
        encoded = json.dumps(metrics, default=str, separators=(",", ":")).encode()
        if len(encoded) > METRICS_BYTES:
            return False
        words = self._words
        words[_METRICS_SEQ] += 1
        words[_METRICS_LENGTH] = len(encoded)
        self._memory[self._metrics_at : self._metrics_at + len(encoded)] = encoded
        words[_METRICS_SEQ] += 1
        return True

    def read(self) -> StatusReading:
        """What the rank last wrote. Never waits for the writer and never fails on what it finds."""
        heartbeat_ns = self._words[_HEARTBEAT]
        step, phase, sequence = self._read_phase()
        return StatusReading(
            rank=self.rank,
            pid=self._words[_PID],
            heartbeat=heartbeat_ns / 1e9 if heartbeat_ns else None,
            step=step,
            phase=phase,
            phase_count=sequence // 2,
            metrics=self._read_metrics(),
            final_status=_WORDS[self._words[_FINAL_STATUS]] if 0 <= self._words[_FINAL_STATUS] < len(_WORDS) else "",
            stop_signal=self._words[_STOP_SIGNAL],
        )

    def release(self) -> None:
        """Let go of the memory, so that the board can be closed."""
        self._words.release()

    def _read_phase(self) -> tuple[int, str, int]:
        for _ in range(_READ_TRIES):
            before = self._words[_PHASE_SEQ]
            step = self._words[_STEP]
            text = self._memory[self._phase_at : self._phase_at + _PHASE_BYTES]
            if before % 2 == 0 and self._words[_PHASE_SEQ] == before:
                break
        return step, text.rstrip(b"\0").decode(errors="replace"), before

    def _read_metrics(self) -> dict[str, Any]:
        for _ in range(_READ_TRIES):
            before = self._words[_METRICS_SEQ]
            length = min(max(0, self._words[_METRICS_LENGTH]), METRICS_BYTES)
            encoded = self._memory[self._metrics_at : self._metrics_at + length]
            if before % 2 == 0 and self._words[_METRICS_SEQ] == before:
                break
        else:
            return {}  # half old and half new numbers would be a lie
        try:
            metrics = json.loads(encoded) if encoded else {}
        except ValueError:
            return {}
        return metrics if isinstance(metrics, dict) else {}


class StatusBoard:
    """The status of every rank. The supervisor creates it; a rank attaches to the descriptor it was given."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd = fd
        self.num_ranks = num_ranks
        self._memory = mmap.mmap(fd, num_ranks * _STATUS_BYTES)
        self._statuses = tuple(RankStatus(self._memory, rank) for rank in range(num_ranks))

    @classmethod
    def create(cls, num_ranks: int) -> "StatusBoard":
        """A new board on which no rank has written."""
        fd = unnamed_file("shoal-board")
        try:
            os.ftruncate(fd, num_ranks * _STATUS_BYTES)
            return cls(fd, num_ranks)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, num_ranks: int) -> "StatusBoard":
        """The board behind a descriptor that another process created. The descriptor belongs to this board from here on.

        Raises:
            RunError: the descriptor is not a board for this many ranks.
        """
        try:
            found = os.fstat(fd).st_size
        except OSError as error:
            raise RunError(f"descriptor {fd} is not the supervisor's board: {error}") from error
        if found != num_ranks * _STATUS_BYTES:
            raise RunError(
                f"descriptor {fd} holds {found} bytes, a board for {num_ranks} ranks has {num_ranks * _STATUS_BYTES}; "
                "the supervisor and this rank run different versions of Shoal or disagree about the number of ranks"
            )
        os.set_inheritable(fd, False)
        return cls(fd, num_ranks)

    def of_rank(self, rank: int) -> RankStatus:
        """The status of one rank."""
        return self._statuses[rank]

    def read(self) -> tuple[StatusReading, ...]:
        """What every rank last wrote, by rank."""
        return tuple(rank_status.read() for rank_status in self._statuses)

    def close(self) -> None:
        """Unmap the memory and close the descriptor; closing twice is allowed."""
        if self.fd < 0:
            return
        for rank_status in self._statuses:
            rank_status.release()
        self._memory.close()
        os.close(self.fd)
        self.fd = -1


class Heartbeat:
    """A daemon thread that beats. It falls silent when the process is stopped or something holds the interpreter's lock."""

    def __init__(self, rank_status: RankStatus, every: float = 0.25) -> None:
        self._slot = rank_status
        self._every = every
        self._stopped = threading.Event()
        rank_status.claim()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop beating; call it before the board is closed."""
        self._stopped.set()
        self._thread.join(timeout=4 * self._every + 1.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            self._slot.beat()


def unnamed_file(name: str) -> int:
    """A file that no folder has, for memory to be shared; ``name`` is what the kernel calls it."""
    # In memory where the system can: a mapping of a file on a full disk kills its writer with SIGBUS.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    handle, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return handle


def _pad(phase: str) -> bytes:
    # Cut bytes may end in half a character; decoding and encoding again drops that half.
    cut = phase.encode()[:_PHASE_BYTES].decode(errors="ignore").encode()
    return cut.ljust(_PHASE_BYTES, b"\0")
