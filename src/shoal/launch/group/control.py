"""The control board: shared memory by which whoever decides about membership tells ranks of a new view, and they answer.

The supervisor writes views, each under an epoch; a rank looks at the epoch, which costs a load, and reads the view when it has
changed. Each rank writes its own answers: that it is ready, which view it has come to, and under which one a collective failed.
All of it is plain stores to memory without a name (see ``telemetry/statusboard.py``), so nobody waits for anybody and no death
leaves anything behind.

    newest | for each slot: ready, arrived, failed, suspect, pace | two texts, each after its length
    8      | 7 x 8 bytes                                          | 64 KiB each, or more for many slots

The first word is the epoch, and in its last bit in which of the two texts the view is. A view is written over the older text, and
epochs may be left out: so what a reader reads is torn only when two views were published meanwhile, and the first of them has
changed the word before the second is written.
"""

import mmap
import os
import time
from dataclasses import dataclass, field

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.telemetry.statusboard import unnamed_file

_LEAST_TEXT_BYTES, _TEXT_BYTES_PER_SLOT = 64 * 1024, 256
"""A view names the member, the slot and the host of every rank."""
_WORDS = 7
_READY, _ARRIVED, _FAILED, _SUSPECT, _STEPS, _COMPUTE, _DATA = range(_WORDS)
_MICRO = 1e6
_LOOK_SECONDS = 0.002
_READ_TRIES = 100


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What kept a process busy in its steps, added up since it began; without its waits for others."""

    steps: int = 0
    compute: float = 0.0
    data: float = 0.0
    """Seconds in which it waited for its own data."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the process in one slot last said."""

    is_ready: bool
    arrived: int
    """The newest epoch whose view it has come to, having left all groups of older ones."""
    failed: int
    """The newest epoch under which it saw a collective fail; 0 for none."""
    suspect: int | None = None
    """The slot that it could not reach then; None where it cannot tell."""
    pace: Pace = field(default_factory=Pace)


class ControlBoard:
    """The board; the supervisor creates it, and ranks attach to the descriptor that they were given."""

    def __init__(self, fd: int, num_slots: int) -> None:
        self.fd, self.num_slots = fd, num_slots
        self._memory = mmap.mmap(fd, _num_bytes(num_slots))
        self._words = memoryview(self._memory)[: 8 * (1 + _WORDS * num_slots)].cast("Q")

    @classmethod
    def create(cls, num_slots: int) -> "ControlBoard":
        """A board without a view."""
        fd = unnamed_file("shoal-control")
        try:
            os.ftruncate(fd, _num_bytes(num_slots))
            return cls(fd, num_slots)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, num_slots: int) -> "ControlBoard":
        """The board behind a descriptor that another process created; it belongs to this board from here on.

        Raises:
            RunError: the descriptor is not a board for so many slots.
        """
        try:
            found = os.fstat(fd).st_size
        except OSError as error:
            raise RunError(f"descriptor {fd} is not the supervisor's control board: {error}") from error
        if found != _num_bytes(num_slots):
            raise RunError(
                f"descriptor {fd} holds {found} bytes, a control board for {num_slots} ranks has {_num_bytes(num_slots)}; the "
                "supervisor and this rank run different versions of Shoal or disagree about the number of ranks"
            )
        os.set_inheritable(fd, False)
        return cls(fd, num_slots)

    @property
    def epoch(self) -> int:
        """Of the newest view; 0 before the first."""
        return self._words[0] >> 1

    def publish(self, epoch: int, text: str) -> None:
        """Put a view up.

        Raises:
            RunError: it is too long.
        """
        encoded = text.encode()
        room = _text_bytes(self.num_slots) - 8
        if len(encoded) > room:
            raise RunError(f"a view of {len(encoded)} bytes does not fit the control board, which has {room}")
        place = 1 - self._words[0] % 2
        start = self._text_start(place)
        self._memory[start : start + 8] = len(encoded).to_bytes(8, "little")
        self._memory[start + 8 : start + 8 + len(encoded)] = encoded
        self._words[0] = epoch << 1 | place

    def read(self) -> tuple[int, str]:
        """The newest epoch and its view.

        Raises:
            RunError: views come faster than they can be read.
        """
        for _ in range(_READ_TRIES):
            word = self._words[0]
            start = self._text_start(word % 2)
            length = min(int.from_bytes(self._memory[start : start + 8], "little"), _text_bytes(self.num_slots) - 8)
            encoded = self._memory[start + 8 : start + 8 + length]
            if self._words[0] == word:
                return word >> 1, encoded.decode(errors="replace")
        raise RunError("views change faster than they can be read")

    def await_newer(self, epoch: int, deadline: Deadline | None) -> bool:
        """Wait until there is a view of a newer epoch; False when there is none in time. None waits for as long as it takes."""
        while self.epoch <= epoch:
            if deadline is not None and deadline.is_over:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def clear(self, slot: int) -> None:
        """Forget what the process before said, when another takes its slot."""
        for word in range(_WORDS):
            self._words[self._word(slot, word)] = 0

    def say_ready(self, slot: int) -> None:
        """Say that the process in a slot can take part."""
        self._words[self._word(slot, _READY)] = 1

    def say_arrived(self, slot: int, epoch: int) -> None:
        """Say that it has left every older group and has come to this view."""
        self._words[self._word(slot, _ARRIVED)] = epoch

    def say_pace(self, slot: int, pace: Pace) -> None:
        """Say what kept it busy."""
        self._words[self._word(slot, _COMPUTE)] = int(max(0.0, pace.compute) * _MICRO)
        self._words[self._word(slot, _DATA)] = int(max(0.0, pace.data) * _MICRO)
        self._words[self._word(slot, _STEPS)] = pace.steps

    def say_failed(self, slot: int, epoch: int, *, suspect: int | None = None) -> None:
        """Say that a collective failed under this view, or that it could not be assembled; and whom it could not reach."""
        self._words[self._word(slot, _SUSPECT)] = 0 if suspect is None else suspect + 1
        self._words[self._word(slot, _FAILED)] = epoch

    def answers(self, slot: int) -> Answers:
        """What the process in a slot last said."""
        # In the order in which they are written, backwards: what is told last is read first.
        steps, data, compute, failed, suspect, arrived, ready = (
            self._words[self._word(slot, word)]
            for word in (_STEPS, _DATA, _COMPUTE, _FAILED, _SUSPECT, _ARRIVED, _READY)
        )
        return Answers(
            is_ready=ready > 0,
            arrived=arrived,
            failed=failed,
            suspect=suspect - 1 if suspect else None,
            pace=Pace(steps=steps, compute=compute / _MICRO, data=data / _MICRO),
        )

    def close(self) -> None:
        """Unmap the memory and close the descriptor; closing twice is allowed."""
        if self.fd < 0:
            return
        self._words.release()
        self._memory.close()
        os.close(self.fd)
        self.fd = -1

    def _word(self, slot: int, word: int) -> int:
        return 1 + slot * _WORDS + word

    def _text_start(self, place: int) -> int:
        return _head_bytes(self.num_slots) + place * _text_bytes(self.num_slots)


def _head_bytes(num_slots: int) -> int:
    return 8 * (1 + _WORDS * num_slots)


def _text_bytes(num_slots: int) -> int:
    return max(_LEAST_TEXT_BYTES, _TEXT_BYTES_PER_SLOT * num_slots)


def _num_bytes(num_slots: int) -> int:
    return _head_bytes(num_slots) + 2 * _text_bytes(num_slots)
