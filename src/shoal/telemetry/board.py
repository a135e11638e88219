"""A page of shared memory on which every rank says where it is, and the supervisor reads.

A rank writes with plain stores: no lock, no system call, no message, so saying "step 12, backward" costs under a microsecond and
can never block training. What is on the board survives the rank: after ``kill -9`` it still says in which step and phase it died.

The memory is a file without a name, handed to the ranks as a file descriptor: nothing is left behind whoever dies. Each slot has
one writer. Text is guarded by a sequence number that is odd while it is being written; a reader that meets an odd or changed
number tries again a few times and then makes do with the words that are there and no metrics: the rank may have been killed.

    slot:  heartbeat | step | phase sequence | pid | metrics sequence | metrics length | said | heard | phase text | metrics
    bytes: 8         | 8    | 8              | 8   | 8                | 8              | 8    | 8     | 80         | 4096

The last word of a rank is here too (``finish``). An exit code of 0 proves nothing: any library can call ``os._exit(0)`` in the
middle of a step. Whoever has not said that it is done is not.
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
_SLOT_BYTES = _HEADER_BYTES + _PHASE_BYTES + METRICS_BYTES
_HEARTBEAT, _STEP, _PHASE_SEQ, _PID, _METRICS_SEQ, _METRICS_LENGTH, _SAID, _HEARD = range(_HEADER_WORDS)
_READ_TRIES = 8

Said = Literal["", "completed", "interrupted"]
"""The last word of a rank; empty until it has spoken it."""
_WORDS: tuple[Said, ...] = ("", "completed", "interrupted")


@dataclass(frozen=True, kw_only=True)
class SlotState:
    """What one rank last said."""

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
    said: Said = ""
    heard: int = 0
    """The signal by which it was asked to stop; 0 when it was not."""


class RankSlot:
    """One rank's part of the board. One process writes it, any number read it."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self.rank = rank
        self._memory = memory
        start = rank * _SLOT_BYTES
        self._words = memoryview(memory)[start : start + _HEADER_BYTES].cast("q")
        self._phase_at = start + _HEADER_BYTES
        self._metrics_at = self._phase_at + _PHASE_BYTES
        self._encoded: dict[str, bytes] = {}
        self._owner = 0

    def claim(self) -> None:
        """Say that this process is the one that writes here, after a first beat: who reads its name must not find another's."""
        self.beat()
        # What the process before it said is not this one's.
        self._words[_SAID] = self._words[_HEARD] = 0
        self._words[_PID] = self._owner = os.getpid()

    def beat(self) -> None:
        """Say that this process runs."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def enter(self, phase: str, step: int) -> None:
        """Say that a phase begins. Phases in which a rank waits for others are named ``wait: <operation>``.

        Raises:
            RunError: this is a fork of the process whose slot this is, and goes on as if it were that one.
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

    def finish(self, said: Said, *, heard: int = 0) -> None:
        """Say that this process did what it was for. A fork of it that came this far has no say.

        Args:
            said: whether all was done, or it stopped in order because it was asked to.
            heard: the signal that asked it.
        """
        if self._words[_PID] == os.getpid():
            self._words[_HEARD] = heard
            self._words[_SAID] = _WORDS.index(said)

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

    def read(self) -> SlotState:
        """What the rank last said. Never waits for the writer and never fails on what it finds."""
        heartbeat_ns = self._words[_HEARTBEAT]
        step, phase, sequence = self._read_phase()
        return SlotState(
            rank=self.rank,
            pid=self._words[_PID],
            heartbeat=heartbeat_ns / 1e9 if heartbeat_ns else None,
            step=step,
            phase=phase,
            phase_count=sequence // 2,
            metrics=self._read_metrics(),
            said=_WORDS[self._words[_SAID]] if 0 <= self._words[_SAID] < len(_WORDS) else "",
            heard=self._words[_HEARD],
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


class Board:
    """The slots of all ranks. The supervisor creates it; a rank attaches to the descriptor it was given."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd = fd
        self.num_ranks = num_ranks
        self._memory = mmap.mmap(fd, num_ranks * _SLOT_BYTES)
        self._slots = tuple(RankSlot(self._memory, rank) for rank in range(num_ranks))

    @classmethod
    def create(cls, num_ranks: int) -> "Board":
        """A new board with empty slots."""
        fd = _unnamed_file()
        try:
            os.ftruncate(fd, num_ranks * _SLOT_BYTES)
            return cls(fd, num_ranks)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, num_ranks: int) -> "Board":
        """The board behind a descriptor that another process created. The descriptor belongs to this board from here on.

        Raises:
            RunError: the descriptor is not a board for this many ranks.
        """
        try:
            found = os.fstat(fd).st_size
        except OSError as error:
            raise RunError(f"descriptor {fd} is not the supervisor's board: {error}") from error
        if found != num_ranks * _SLOT_BYTES:
            raise RunError(
                f"descriptor {fd} holds {found} bytes, a board for {num_ranks} ranks has {num_ranks * _SLOT_BYTES}; "
                "the supervisor and this rank run different versions of Shoal or disagree about the number of ranks"
            )
        os.set_inheritable(fd, False)
        return cls(fd, num_ranks)

    def slot(self, rank: int) -> RankSlot:
        """The part of one rank."""
        return self._slots[rank]

    def read(self) -> tuple[SlotState, ...]:
        """What every rank last said, by rank."""
        return tuple(slot.read() for slot in self._slots)

    def close(self) -> None:
        """Unmap the memory and close the descriptor; closing twice is allowed."""
        if self.fd < 0:
            return
        for slot in self._slots:
            slot.release()
        self._memory.close()
        os.close(self.fd)
        self.fd = -1


class Heartbeat:
    """A daemon thread that beats. It falls silent when the process is stopped or something holds the interpreter's lock."""

    def __init__(self, slot: RankSlot, every: float = 0.25) -> None:
        self._slot = slot
        self._every = every
        self._stopped = threading.Event()
        slot.claim()
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


def _unnamed_file() -> int:
    # In memory where the system can: a mapping of a file on a full disk kills its writer with SIGBUS.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal-board")
    handle, path = tempfile.mkstemp(prefix="shoal-board-")
    os.unlink(path)
    return handle


def _pad(phase: str) -> bytes:
    # Cut bytes may end in half a character; decoding and encoding again drops that half.
    cut = phase.encode()[:_PHASE_BYTES].decode(errors="ignore").encode()
    return cut.ljust(_PHASE_BYTES, b"\0")
