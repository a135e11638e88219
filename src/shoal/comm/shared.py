"""Collectives through memory that the ranks of one machine share, in place of gloo.

gloo moves bytes between processes of one machine through sockets and threads (``benchmarks/collectives`` compares the two).
It also adds in an order that depends on the size of the tensor. Here bytes are copied through slots of the group's memory
(``sharedmemory.py``) that are small enough to stay in the cache, in rounds, and sums are always
``rank 0 + rank 1 + ...`` in the tensor's own dtype, so that every rank has the same bits, and the bits of one process that adds
in that order.

**Why two slots are enough.** A rank writes its slot, meets the others, reads theirs, and then writes its *other* slot. It comes
back to the first one after it has met the others once more, and nobody came to that meeting before he had read everything of
the turn before:

    rank 0:  write A  meet  read A's  write B  meet  read B's  write A ...
    rank 1:  write A  meet  read A's        write B  meet  read B's ...        B's meeting says: I have read all the A's

So one rank writes its next piece while another still reads the last, and one meeting per piece is all there is.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.sharedmemory import (
    NUM_TURNS,
    SPIN_SECONDS,
    CannotShare,
    GroupMemory,
    Member,
    Rounds,
    Watch,
    announce,
    memory_bytes,
    open_memory,
    tell,
)
from shoal.core.errors import RunError

SLOT_BYTES = 512 * 1024
"""A slot of each turn. Small enough for a shared cache; other sizes have not been compared yet."""
WHOLE_BYTES = 32 * 1024
"""Up to this size everyone adds everything, which saves the second meeting. Chosen, not measured."""
_ALIGN = 64
"""Sections and slices begin at a multiple of this many elements, so that ranks write to different cache lines."""

_Combine: TypeAlias = Callable[..., Tensor]
_OPERATIONS = ("all_reduce", "all_reduce_max", "reduce_scatter", "all_gather", "all_to_all", "ring_shift", "broadcast")
_DTYPES = (
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_AMOUNT = (1 << 56) - 1


class SharedTransport:
    """Moves the bytes of one group of ranks of this machine; a ``Transport`` for CPU tensors. Used by one thread."""

    is_ordered = True

    def __init__(self, memory: GroupMemory, rounds: Rounds) -> None:
        self.rank = rounds.member.rank
        self.size = memory.num_ranks
        self._memory = memory
        self._rounds = rounds
        self._turn = 0
        self._note = 0
        self._is_checked = True
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        self._combine(tensor, torch.add, "all_reduce")

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        self._combine(tensor, torch.maximum, "all_reduce_max")

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. In each round a rank's slot holds a section for every other rank; its own part stays where it is."""
        flat, out = _flat(whole), _flat(own)
        starts = _starts(counts)
        width = SLOT_BYTES // flat.itemsize // (self.size - 1) // _ALIGN * _ALIGN
        self._enter("reduce_scatter", flat.dtype, flat.nbytes)
        for at in range(0, max(counts), width):
            slots = self._next_slots(flat.dtype)
            for place in self._others():
                num = min(width, counts[place] - at)
                if num > 0:
                    section = _section(place, self.rank, width)
                    slots[self.rank].narrow(0, section, num).copy_(flat.narrow(0, starts[place] + at, num))
            self._meet()
            num = min(width, counts[self.rank] - at)
            if num > 0:
                parts = [
                    flat.narrow(0, starts[place] + at, num)
                    if place == self.rank
                    else slots[place].narrow(0, _section(self.rank, place, width), num)
                    for place in range(self.size)
                ]
                self._fold(parts, torch.add, out.narrow(0, at, num))

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``."""
        flat, sent = _flat(whole), _flat(own)
        starts = _starts(counts)
        width = SLOT_BYTES // flat.itemsize
        self._enter("all_gather", flat.dtype, flat.nbytes)
        mine = flat.narrow(0, starts[self.rank], counts[self.rank])
        if sent.data_ptr() != mine.data_ptr():
            mine.copy_(sent)
        for at in range(0, max(counts), width):
            slots = self._next_slots(flat.dtype)
            num = min(width, counts[self.rank] - at)
            if num > 0:
                slots[self.rank].narrow(0, 0, num).copy_(sent.narrow(0, at, num))
            self._meet()
            for place in self._others():
                num = min(width, counts[place] - at)
                if num > 0:
                    flat.narrow(0, starts[place] + at, num).copy_(slots[place].narrow(0, 0, num))

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``. A rank knows its own sizes only, so the first round also tells how many rounds there are."""
        assert len(sent) == len(received) == self.size
        outgoing, incoming = [_flat_bytes(part) for part in sent], [_flat_bytes(part) for part in received]
        if outgoing[self.rank].numel():
            incoming[self.rank].copy_(outgoing[self.rank])
        width = SLOT_BYTES // (self.size - 1) // _ALIGN * _ALIGN
        others = self._others()
        most = max(max(outgoing[place].numel(), incoming[place].numel()) for place in others)
        self._enter("all_to_all", torch.uint8, most)
        at = 0
        while at == 0 or at < most:
            slots = self._next_slots(torch.uint8)
            for place in others:
                num = min(width, outgoing[place].numel() - at)
                if num > 0:
                    section = _section(place, self.rank, width)
                    slots[self.rank].narrow(0, section, num).copy_(outgoing[place].narrow(0, at, num))
            most = max(most, self._meet())
            for place in others:
                num = min(width, incoming[place].numel() - at)
                if num > 0:
                    section = _section(self.rank, place, width)
                    incoming[place].narrow(0, at, num).copy_(slots[place].narrow(0, section, num))
            at += width

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        outgoing, incoming = _flat_bytes(sent), _flat_bytes(received)
        source = (self.rank - by) % self.size
        if source == self.rank:
            incoming.copy_(outgoing)
            return
        most = max(outgoing.numel(), incoming.numel())
        self._enter("ring_shift", torch.uint8, most)
        at = 0
        while at == 0 or at < most:
            slots = self._next_slots(torch.uint8)
            num = min(SLOT_BYTES, outgoing.numel() - at)
            if num > 0:
                slots[self.rank].narrow(0, 0, num).copy_(outgoing.narrow(0, at, num))
            most = max(most, self._meet())
            num = min(SLOT_BYTES, incoming.numel() - at)
            if num > 0:
                incoming.narrow(0, at, num).copy_(slots[source].narrow(0, 0, num))
            at += SLOT_BYTES

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``."""
        flat = _flat_bytes(tensor)
        self._enter("broadcast", torch.uint8, flat.nbytes)
        for piece in torch.split(flat, SLOT_BYTES):
            slot = self._next_slots(torch.uint8)[source].narrow(0, 0, piece.numel())
            if self.rank == source:
                slot.copy_(piece)
            self._meet()
            if self.rank != source:
                piece.copy_(slot)

    def reduce_parts(self, parts: Sequence[Tensor], own: Tensor, carry: Tensor | None) -> None:
        """Add what all ranks have for this one to ``carry``, in the order of ranks, and put the sum into ``own``.

        A reduce-scatter whose slices need not lie beside one another, for a sum that began on another host (``twolevel.py``).

        Args:
            parts: what this rank has for each rank; flat, of the same sizes on all ranks. All are left undefined.
            own: may be ``parts[rank]`` or ``carry`` itself.
            carry: what the sum starts from; None for nothing.
        """
        itemsize = own.itemsize
        width = SLOT_BYTES // itemsize // (self.size - 1) // _ALIGN * _ALIGN
        self._enter("reduce_scatter", own.dtype, sum(part.numel() for part in parts) * itemsize)
        for at in range(0, max(part.numel() for part in parts), width):
            slots = self._next_slots(own.dtype)
            for place in self._others():
                num = min(width, parts[place].numel() - at)
                if num > 0:
                    section = _section(place, self.rank, width)
                    slots[self.rank].narrow(0, section, num).copy_(parts[place].narrow(0, at, num))
            self._meet()
            num = min(width, own.numel() - at)
            if num > 0:
                terms = [
                    parts[place].narrow(0, at, num)
                    if place == self.rank
                    else slots[place].narrow(0, _section(self.rank, place, width), num)
                    for place in range(self.size)
                ]
                start = [] if carry is None else [carry.narrow(0, at, num)]
                self._fold([*start, *terms], torch.add, own.narrow(0, at, num))

    def close(self) -> None:
        """Give the memory back; closing twice is allowed. Any operation afterwards fails."""
        self._rounds.close()
        # The slots must go first: they point into the memory.
        self._slots.clear()
        self._memory.close()

    def _combine(self, tensor: Tensor, combine: _Combine, operation: str) -> None:
        flat = _flat(tensor)
        num_bytes = flat.nbytes
        self._enter(operation, flat.dtype, num_bytes)
        # Two ranks add everything twice: that is no more work than handing one's half of the result to the other.
        one_round = self.size == 2 or num_bytes <= WHOLE_BYTES
        step = self._combine_whole if one_round else self._combine_slices
        for piece in (flat,) if num_bytes <= SLOT_BYTES else torch.split(flat, SLOT_BYTES // flat.itemsize):
            step(piece, combine)

    def _combine_whole(self, piece: Tensor, combine: _Combine) -> None:
        """Everyone reads everything: one meeting."""
        num = piece.numel()
        slots = [slot.narrow(0, 0, num) for slot in self._next_slots(piece.dtype)]
        slots[self.rank].copy_(piece)
        self._meet()
        slots[self.rank] = piece
        self._fold(slots, combine, piece)

    def _combine_slices(self, piece: Tensor, combine: _Combine) -> None:
        """Each rank adds up a slice, into its own slot, and all copy the results: two meetings, 1/n of the additions."""
        num = piece.numel()
        width = -(-num // (self.size * _ALIGN)) * _ALIGN
        starts = [min(place * width, num) for place in range(self.size + 1)]
        slices = [(starts[place], starts[place + 1] - starts[place]) for place in range(self.size)]
        slots = self._next_slots(piece.dtype)
        start, length = slices[self.rank]
        # Its own slice a rank reads from the tensor; that part of its slot is kept for the result.
        for begin, end in ((0, start), (start + length, num)):
            if end > begin:
                slots[self.rank].narrow(0, begin, end - begin).copy_(piece.narrow(0, begin, end - begin))
        self._meet()
        if length:
            parts = [
                (piece if place == self.rank else slots[place]).narrow(0, start, length) for place in range(self.size)
            ]
            self._fold(parts, combine, slots[self.rank].narrow(0, start, length))
        self._meet()
        for place, (start, length) in enumerate(slices):
            if length:
                piece.narrow(0, start, length).copy_(slots[place].narrow(0, start, length))

    def _fold(self, parts: Sequence[Tensor], combine: _Combine, out: Tensor) -> None:
        """``parts[0] + parts[1] + ...`` from the left, into ``out``, which may be one of the parts."""
        total = parts[0]
        for part in parts[1:-1]:
            # Not in ``out``: if that is a later part, it would be overwritten before it is read.
            total = combine(total, part, out=self._scratch_for(out))
        combine(total, parts[-1], out=out)

    def _scratch_for(self, out: Tensor) -> Tensor:
        scratch = self._scratch.get(out.dtype)
        if scratch is None or scratch.numel() < out.numel():
            scratch = self._scratch[out.dtype] = torch.empty(out.numel(), dtype=out.dtype)
        return scratch.narrow(0, 0, out.numel())

    def _others(self) -> list[int]:
        return [place for place in range(self.size) if place != self.rank]

    def _next_slots(self, dtype: torch.dtype) -> list[Tensor]:
        """All ranks' slots of the next turn, as flat tensors; this rank writes its own, and may do so now."""
        slots = self._slots.get(dtype)
        if slots is None:
            slots = self._slots[dtype] = [
                [self._memory.slot(turn, place, dtype) for place in range(self.size)] for turn in range(NUM_TURNS)
            ]
        self._turn ^= 1
        return slots[self._turn]

    def _enter(self, operation: str, dtype: torch.dtype, amount: int) -> None:
        """Begin an operation, and leave a note of it, so that ranks that do different things are told so, not given garbage."""
        self._rounds.begin(operation)
        self._note = _pack(_OPERATIONS.index(operation), _DTYPE_NUMBERS[dtype], amount)
        self._rounds.leave_note(self._note)
        self._is_checked = False

    def _meet(self) -> int:
        """Meet the others; at an operation's first meeting, compare notes. Returns the largest amount that a peer noted, then."""
        self._rounds.meet()
        if self._is_checked:
            return 0
        self._is_checked = True
        most = 0
        for place, note in self._rounds.read_notes():
            if note != self._note:
                self._compare(place, note)
                most = max(most, note & _AMOUNT)
        return most

    def _compare(self, place: int, note: int) -> None:
        ours, theirs = _unpack(self._note), _unpack(note)
        # Of these two, each rank sees a part only.
        if ours[:2] == theirs[:2] and ours[0] in ("all_to_all", "ring_shift"):
            return
        member = self._rounds.member
        raise self._rounds.fail(
            RunError(
                f"along axis {member.axis}, {member.name(place)} does '{theirs[0]}' of {theirs[2]} bytes of {theirs[1]} where "
                f"{member.name(self.rank)} does '{ours[0]}' of {ours[2]} bytes of {ours[1]}; all ranks of an axis must do "
                "the same in the same order, so look for a condition in the model or the script that differs from rank to rank"
            )
        )


def build_shared_transport(
    group: dist.ProcessGroup, *, axis: str, deadline_seconds: float, spins: bool
) -> SharedTransport | None:
    """A transport through shared memory, or None on every rank if one of them cannot. Collective.

    Args:
        group: the ranks, as a torch group that can move CPU tensors.
        axis: its name, for errors.
        deadline_seconds: how long to wait for a peer.
        spins: look for a moment before going to sleep; wrong where ranks outnumber cores, since the peer may need this one.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine, refusal = announce(is_first=rank == 0, num_bytes=memory_bytes(size, SLOT_BYTES))
    transport: SharedTransport | None = None
    try:
        everyone = tell(group, mine)
        if not refusal:
            ranks = tuple(dist.get_process_group_ranks(group))
            member = Member(axis=axis, rank=rank, ranks=ranks, pids=tuple(other.pid for other in everyone))
            try:
                memory = open_memory(everyone[0], num_ranks=size, slot_bytes=SLOT_BYTES)
                spin_seconds = SPIN_SECONDS if spins else 0.0
                rounds = Rounds(
                    memory, Watch(member), member, deadline_seconds=deadline_seconds, spin_seconds=spin_seconds
                )
                transport = SharedTransport(memory, rounds)
            except CannotShare:
                # Not an error: the vote tells the others, and the torch group does the same work.
                transport = None
        vote = torch.tensor([0 if transport is None else 1])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    finally:
        # After the vote nobody opens it any more; the mappings keep the memory alive.
        mine.close()
    if transport is not None and not vote.item():
        transport.close()
        return None
    return transport


def _pack(operation: int, dtype: int, amount: int) -> int:
    # One more than its number, so that no note is zero, which is what the memory holds at first.
    return (operation + 1) << 60 | dtype << 56 | amount


def _unpack(note: int) -> tuple[str, torch.dtype, int]:
    operation = (note >> 60) - 1
    name = _OPERATIONS[operation] if 0 <= operation < len(_OPERATIONS) else "nothing"
    return name, _DTYPES[min(note >> 56 & 15, len(_DTYPES) - 1)], note & _AMOUNT


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    # ``data``: like a torch collective this is no operation for autograd to see, neither a gradient nor a new version.
    return tensor.data.view(-1)


def _flat_bytes(tensor: Tensor) -> Tensor:
    return _flat(tensor).view(torch.uint8)


def _starts(counts: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))


def _section(receiver: int, sender: int, width: int) -> int:
    """Where in the sender's slot the receiver's part begins; the sender has none in its own slot."""
    return (receiver if receiver < sender else receiver - 1) * width
