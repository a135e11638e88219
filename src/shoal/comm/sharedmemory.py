"""Memory that the ranks of one group share, without a name: nothing is left behind when a process is killed.

The group's first rank makes it (``memfd_create``) and the others open it through ``/proc``; its process id, its descriptor and
a random token travel over the group's torch process group. The token is in the name of the memory and in its first word: a rank
on another host, or in a container that cannot see the first rank, finds neither, and then all ranks of the group agree to do
without (one vote), because a group of which some share memory and some do not would wait for ever.

``torch``'s own shared tensors and ``multiprocessing.shared_memory`` are files in ``/dev/shm``, which outlive a killed process
and are limited to 64 MB in a container.

    head:  token | a line per rank: count of rounds, notes        (whole pages; a line is 128 bytes, two cache lines)
    body:  for each of two turns, a slot per rank                  (the payload on its way)

In it the ranks count rounds (``Rounds``): all ranks of a group say that they have arrived, and each goes on when all have.
Arriving adds one to a rank's own word, waiting is looking at the others'. A rank that finds a peer late looks for a moment
(``SPIN_SECONDS``: a peer with the same work is seldom later, and waking up a sleeper costs more) and then sleeps in the kernel,
in slices, so that the death of a peer and the end of the deadline are noticed. A dead peer is known at once, by a descriptor of
its process, whatever it was doing and whether or not its parent has noticed.
"""

import mmap
import os
import secrets
import select
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import futex
from shoal.comm.channel import PeerLost
from shoal.comm.interruption import reason_to_stop
from shoal.comm.trafficcounter import note_wait
from shoal.core.errors import RunError

LINE_BYTES = 128
NUM_TURNS = 2
_PAGE_BYTES = 4096


class CannotShare(Exception):
    """This rank cannot reach the memory of its group; says why."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What every rank tells the others before they share memory. Only the first rank's descriptor and token count."""

    pid: int
    descriptor: int = -1
    token: int = 0

    def name(self) -> str:
        """The name under which the kernel knows the memory; not a path."""
        return f"shoal-group-{self.token:016x}"

    def close(self) -> None:
        """Close the descriptor, where there is one, when everyone has opened the memory or given up."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


class GroupMemory:
    """One rank's mapping of its group's memory. Everything in it is zero at first."""

    def __init__(self, descriptor: int, *, num_ranks: int, slot_bytes: int) -> None:
        self.num_ranks = num_ranks
        self.slot_bytes = slot_bytes
        self._mapping = mmap.mmap(descriptor, memory_bytes(num_ranks, slot_bytes))
        self._head = memoryview(self._mapping)[: _head_bytes(num_ranks)]
        self.words = self._head.cast("I")
        """The head as 32-bit words."""
        self.notes = self._head.cast("Q")
        """The head as 64-bit words."""
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self._release = weakref.finalize(self, _unmap, self._mapping, [self.words, self.notes, self._head])
        # At exit the kernel does it, and nothing that still holds a slot is pulled the rug from under.
        self._release.atexit = False

    def slot(self, turn: int, rank: int, dtype: torch.dtype) -> Tensor:
        """The bytes that ``rank`` writes at ``turn``, as a flat tensor. It must not be used after ``close``."""
        start = _head_bytes(self.num_ranks) + (turn * self.num_ranks + rank) * self.slot_bytes
        return self.bytes[start : start + self.slot_bytes].view(dtype)

    def close(self) -> None:
        """Unmap the memory. Every slot that was taken must have been released."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._release()


def _unmap(mapping: mmap.mmap, views: Sequence[memoryview]) -> None:
    for view in views:
        view.release()
    mapping.close()


def announce(*, is_first: bool, num_bytes: int) -> tuple[Announcement, str]:
    """What this rank says, and why it cannot share memory if it cannot; the first rank makes the memory here."""
    if not futex.is_supported() or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return Announcement(pid=os.getpid()), "this system has no futex, memfd or pidfd"
    if not is_first:
        return Announcement(pid=os.getpid()), ""
    token = secrets.randbits(62)
    try:
        descriptor = os.memfd_create(Announcement(pid=0, token=token).name())
    except OSError as error:
        return Announcement(pid=os.getpid()), f"memfd_create: {error}"
    mine = Announcement(pid=os.getpid(), descriptor=descriptor, token=token)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.pwrite(descriptor, token.to_bytes(8, "little"), 0)
    except OSError as error:
        return mine, f"{num_bytes} bytes of memory: {error}"
    return mine, ""


def tell(group: dist.ProcessGroup, mine: Announcement) -> list[Announcement]:
    """What every rank of a gloo group says, by rank. Collective."""
    sent = torch.tensor([mine.pid, mine.descriptor, mine.token])
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    rows = [[int(value) for value in row] for row in received]
    return [Announcement(pid=pid, descriptor=descriptor, token=token) for pid, descriptor, token in rows]


def open_memory(first: Announcement, *, num_ranks: int, slot_bytes: int) -> GroupMemory:
    """Map the memory that the first rank announced.

    Raises:
        CannotShare: it is not there, or it is another one.
    """
    if first.descriptor < 0:
        raise CannotShare("the first rank made no memory")
    path = f"/proc/{first.pid}/fd/{first.descriptor}"
    try:
        # The name first: opening a stranger's descriptor of the same number could do something, if it is a device.
        if first.name() not in os.readlink(path):
            raise CannotShare(f"{path} is not the memory of this group")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CannotShare(f"{path}: {error}") from error
    try:
        found, wanted = os.fstat(descriptor).st_size, memory_bytes(num_ranks, slot_bytes)
        if found != wanted:
            raise CannotShare(f"{path} has {found} bytes, the group needs {wanted}")
        memory = GroupMemory(descriptor, num_ranks=num_ranks, slot_bytes=slot_bytes)
    except OSError as error:
        raise CannotShare(f"{path}: {error}") from error
    finally:
        os.close(descriptor)
    if memory.notes[0] != first.token:
        memory.close()
        raise CannotShare(f"{path} does not hold the group's token")
    return memory


def memory_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Size of a group's memory; only the part that has been used is resident."""
    return _head_bytes(num_ranks) + NUM_TURNS * num_ranks * slot_bytes


def _head_bytes(num_ranks: int) -> int:
    return -(-LINE_BYTES * (num_ranks + 1) // _PAGE_BYTES) * _PAGE_BYTES


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
        started = time.perf_counter_ns()
        try:
            self._wait_since(started, word, address, late)
        finally:
            note_wait(time.perf_counter_ns() - started)

    def _wait_since(self, started: int, word: int, address: int, late: int) -> None:
        words = self._words
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
        if not dead and (reason := reason_to_stop()) is not None:
            raise self.fail(PeerLost(f"{reason}, so nobody comes to '{self.operation}' any more", ranks=[]))
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
