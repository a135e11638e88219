"""Memory that the ranks of one group share, without a name: nothing is left behind when a process is killed.

The group's first rank makes it (``memfd_create``) and the others open it through ``/proc``; its process id, its descriptor and a
random token travel over the group's torch process group. The token is in the name of the memory and in its first word: a rank
on another host, or in a container that cannot see the first rank, finds neither, and then all ranks of the group agree to do
without (one vote), because a group of which some share memory and some do not would wait for ever.

``torch``'s own shared tensors and ``multiprocessing.shared_memory`` are files in ``/dev/shm``, which outlive a killed process
and are limited to 64 MB in a container.

    head:  token | a line per rank: count of rounds, notes        (whole pages; a line is 128 bytes, two cache lines)
    body:  for each of two turns, a slot per rank                  (the payload on its way)
"""

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import futex

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
        """Unmap. Whoever took a slot has let go of it."""
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
