"""Rounds: all ranks of a group say that they have arrived, and each goes on when all have.

A rank counts its rounds in a word of its own in the group's memory; arriving adds one to it, waiting is looking at the others'.
A rank that finds a peer late looks for a moment (``SPIN_SECONDS``: a peer with the same work is seldom later, and waking up a
sleeper costs more) and then sleeps in the kernel, in slices, so that the death of a peer and the end of the deadline are noticed.
A dead peer is known at once, by a descriptor of its process, whatever it was doing and whether or not its parent has noticed.
"""

import os
import select
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm import futex
from shoal.comm.channel import PeerLost
from shoal.comm.memory import LINE_BYTES, CannotShare, GroupMemory
from shoal.core.errors import RunError

SPIN_SECONDS = 100e-6
_SLICE_SECONDS = 0.05
_WORDS = LINE_BYTES // 4
_NOTES = LINE_BYTES // 8


@dataclass(frozen=True, kw_only=True)
class Member:
    """This rank's place in a group, in the words in which an error names it."""

    axis: str
    rank: int
    """Place in the group."""
    ranks: tuple[int, ...]
    """Ranks of the run, by place in the group."""
    pids: tuple[int, ...]

    def name(self, place: int) -> str:
        """How to name the rank at ``place``."""
        return f"rank {self.ranks[place]} (pid {self.pids[place]})"


class Watch:
    """Knows which peers have died, without their help."""

    def __init__(self, member: Member) -> None:
        """Begin to watch. The peers are known to live: they take part in a vote afterwards.

        Raises:
            CannotShare: the kernel does not let this rank watch a peer.
        """
        self._places: dict[int, int] = {}
        # Before the first descriptor is opened, so that a failure half way leaves none open.
        self.close = weakref.finalize(self, _close_all, self._places)
        self._poll = select.poll()
        for place, pid in enumerate(member.pids):
            if place != member.rank:
                try:
                    descriptor = os.pidfd_open(pid)
                except OSError as error:
                    self.close()
                    raise CannotShare(f"cannot watch process {pid}: {error}") from error
                self._places[descriptor] = place
                self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> list[int]:
        """Places of the peers that have ended."""
        return sorted(self._places[descriptor] for descriptor, _ in self._poll.poll(0))


def _close_all(places: dict[int, int]) -> None:
    for descriptor in places:
        os.close(descriptor)
    places.clear()


class Rounds:
    """One rank's part in its group's rounds. Used by one thread."""

    def __init__(
        self, memory: GroupMemory, watch: Watch, member: Member, *, deadline_seconds: float, spin_seconds: float
    ) -> None:
        self.member = member
        self.watch = watch
        self.deadline_seconds = deadline_seconds
        self.spin_ns = int(spin_seconds * 1e9)
        self.operation = ""
        """What the rank is doing, for an error."""
        self._words = memory.words
        self._notes = memory.notes
        self._address = memory.address
        size = memory.num_ranks
        # The first line is the token's.
        self._peers = [
            (place, (place + 1) * _WORDS, memory.address + (place + 1) * LINE_BYTES)
            for place in (*range(member.rank + 1, size), *range(member.rank))
        ]
        self._own_address = memory.address + (member.rank + 1) * LINE_BYTES
        self._own_note = (member.rank + 1) * _NOTES + 2
        self._count = 0
        self._num_notes = 0
        self._failure: RunError | None = None

    def begin(self, operation: str) -> None:
        """Say what the next rounds are for.

        Raises:
            RunError: the group failed before, or was closed.
        """
        if self._failure is not None:
            raise self._failure
        self.operation = operation

    def meet(self) -> None:
        """Arrive, and wait until everyone has. What a rank wrote before it arrived can then be read by all.

        Raises:
            PeerLost: a peer died or did not arrive within the deadline.
        """
        # Nobody can be further behind than the last round, so this is the only count that means "not yet".
        late = self._count
        self._count = (late + 1) & 0xFFFFFFFF
        futex.advance(self._own_address)
        words = self._words
        for _, word, address in self._peers:
            if words[word] == late:
                self._wait(word, address, late)
        futex.order_loads(self._own_address)

    def leave_note(self, note: int) -> None:
        """Put down a 64-bit number for the others to read after the next round.

        Two places take turns, for the reason that slots do (see ``SharedTransport``).
        """
        self._num_notes ^= 1
        self._notes[self._own_note + self._num_notes] = note

    def read_notes(self) -> list[tuple[int, int]]:
        """Every peer's place and the note that it left, after the round that followed."""
        notes, turn = self._notes, self._num_notes + 2
        return [(place, notes[word // 2 + turn]) for place, word, _ in self._peers]

    def fail(self, failure: RunError) -> RunError:
        """Keep this group from being used any further: its ranks are not in the same round any more."""
        self._failure = failure
        return failure

    def close(self) -> None:
        """Stop watching; the next round fails."""
        self.watch.close()
        self.fail(RunError(f"the mesh is closed, so axis {self.member.axis} cannot be used any more"))

    def _wait(self, word: int, address: int, late: int) -> None:
        words = self._words
        started = time.perf_counter_ns()
        until = started + self.spin_ns
        while time.perf_counter_ns() < until:
            if words[word] != late:
                return
            # Costs nothing on a core of one's own; on a shared one the peer may be the next to run.
            os.sched_yield()
        while words[word] == late:
            futex.sleep_while(address, late, _SLICE_SECONDS)
            if words[word] == late:
                self._look_for_trouble(word, late, (time.perf_counter_ns() - started) / 1e9)

    def _look_for_trouble(self, word: int, late: int, waited: float) -> None:
        dead = self.watch.dead()
        # A peer that went home after this round has seen everyone arrive in it, and so does this rank if it looks again.
        if self._words[word] != late:
            return
        if not dead and waited < self.deadline_seconds:
            return
        names = [self.member.name(place) for place in dead or self._late_places(late)]
        what = "died" if dead else f"did not arrive within the deadline of {self.deadline_seconds:g} s"
        mine = self.member.ranks[self.member.rank]
        raise self.fail(
            PeerLost(
                f"{' and '.join(names)} {what}: rank {mine} waited {waited:.1f} s for it in '{self.operation}' along "
                f"axis {self.member.axis}; look at that rank's own output for the cause",
                ranks=[self.member.ranks[place] for place in dead or self._late_places(late)],
            )
        )

    def _late_places(self, late: int) -> Sequence[int]:
        return sorted(place for place, word, _ in self._peers if self._words[word] == late)
