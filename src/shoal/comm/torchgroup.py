"""Collectives through a torch process group: gloo on the CPU, nccl on CUDA.

On the CPU gloo carries messages from rank to rank only. Its own collectives want equal counts, add in an order that depends on
the size of the tensor, and between hosts take 1.6 (two hosts) to 1.2 (four) times as long as the bytes need. These add in the
order of ranks, so that a sum has the bits of one process that adds in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.trafficcounter import waiting

PAIR_ELEMENTS = 1 << 18
"""Elements of a slice that travel together in a reduction between two ranks: what one takes to add, the next takes to come."""
ROUND_ELEMENTS = 1 << 15
"""The same between more than two: see ``TorchTransport._exchange``."""
GATHER_ELEMENTS = 1 << 17
"""The same in a gather."""
GATHERED_BYTES = 64 * 1024
"""Up to so many bytes of all ranks together a sum is one exchange: every rank gets everything and adds it up."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One tensor to a rank and one from a rank, by their places in the group; either may be empty."""

    sent: Tensor
    to: int
    received: Tensor
    origin: int


def _pieces(part: Tensor) -> tuple[Tensor, ...]:
    """A part of a gather as it travels."""
    return torch.split(part, GATHER_ELEMENTS) if part.numel() else ()


def wait_for(work: dist.Work | None) -> None:
    """Wait for a message, and count that as waiting; None is one that is empty."""
    if work is not None:
        with waiting():
            work.wait()


class TorchTransport:
    """A torch process group: gloo on the CPU, nccl on CUDA."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        is_ordered: bool = True,
        ranks: Sequence[int] | None = None,
        ring: Sequence[int] | None = None,
    ) -> None:
        """``is_ordered`` is False where the tensors are not the CPU's: nccl adds as its algorithm likes.

        ``ranks`` are some of the group's, for messages between them only; left out, all. ``ring`` is the order in which gathers
        go round, as places: host by host, so that as little as possible crosses between hosts.
        """
        self.group = group
        self.ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._ring = list(range(len(self.ranks)) if ring is None else ring)
        self.is_ordered = is_ordered or len(self.ranks) <= 2

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``. On the CPU every rank adds up a slice in the order of ranks and gives it to the others.

        This moves the bytes of gloo's ring, whose sums have another order for every slice.
        """
        if tensor.is_cuda or not self.is_ordered:
            with waiting():
                dist.all_reduce(tensor, group=self.group)
            return
        flat, size = tensor.data.view(-1), len(self.ranks)
        if flat.nbytes * size <= GATHERED_BYTES:
            terms = flat.new_empty(size, flat.numel())
            self.all_gather(flat, terms.view(-1), [flat.numel()] * size)
            flat.copy_(terms[0])
            for term in terms[1:]:
                flat.add_(term)
            return
        parts = torch.tensor_split(flat, size)
        counts = [part.numel() for part in parts]
        self.reduce_scatter(flat, parts[self.rank], counts)
        self.all_gather(parts[self.rank], flat, counts)

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        with waiting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. On the CPU every rank gets its slice from all others and adds in the order of ranks.

        gloo's reduce-scatter is an all-reduce and wants equal counts. What has come is added while the next chunk is on its way.
        """
        if whole.is_cuda:
            self._reduce_scatter_padded(whole, own, counts)
            return
        parts, size = torch.split(whole, list(counts)), len(self.ranks)
        width = PAIR_ELEMENTS if size == 2 else ROUND_ELEMENTS
        chunks = [slice(start, start + width) for start in range(0, max(counts), width)]
        mine, came = parts[self.rank], 0
        received: list[list[Tensor]] = []

        def chunk_rounds(chunk: slice) -> Iterator[Exchange]:
            here = mine[chunk]
            terms = [here if peer == self.rank else torch.empty_like(here) for peer in range(size)]
            received.append(terms)
            for to, origin in self._turns():
                yield Exchange(parts[to][chunk], to, terms[origin], origin)

        for _ in self._exchange(one for chunk in chunks for one in chunk_rounds(chunk)):
            came += 1
            if came % (size - 1):
                continue
            number = came // (size - 1) - 1
            terms, received[number] = received[number], []
            if terms[0].numel():
                total = terms[0].clone() if self.rank == 0 else terms[0]
                for term in terms[1:]:
                    total.add_(term)
                own[chunks[number]].copy_(total)

    def _reduce_scatter_padded(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """nccl has it in one call, for equal counts: shorter slices end in zeros."""
        most = max(counts)
        padded = whole.new_zeros(len(counts), most)
        for row, part in zip(padded, torch.split(whole, list(counts)), strict=True):
            row[: part.numel()].copy_(part)
        total = whole.new_empty(most)
        with waiting():
            dist.reduce_scatter_tensor(total, padded.view(-1), group=self.group)
        own.copy_(total[: own.numel()])

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. On the CPU every rank sends its slice to all others at once, because gloo wants equal counts."""
        parts = torch.split(whole, list(counts))
        if whole.is_cuda:
            most = max(counts)
            sent = own.new_zeros(most)
            sent[: own.numel()].copy_(own)
            gathered = whole.new_empty(len(counts), most)
            with waiting():
                dist.all_gather_into_tensor(gathered.view(-1), sent, group=self.group)
            for row, part in zip(gathered, parts, strict=True):
                part.copy_(row[: part.numel()])
            return
        mine = parts[self.rank]
        if own.numel() and own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        self.gather_parts(parts)

    def gather_parts(self, parts: Sequence[Tensor]) -> None:
        """Get ``parts[r]`` from every rank r, which has filled in its own; CPU tensors, anywhere in memory.

        Round a ring: a rank gives the next one what it has, then what came to it. One connection carries everything, at its full
        speed from the first byte to the last.
        """
        size, at = len(self.ranks), self._ring.index(self.rank)
        after, before = self.ranks[self._ring[(at + 1) % size]], self.ranks[self._ring[at - 1]]
        sent = [self._ring[(at - by) % size] for by in range(size)]
        arriving = [
            [(piece, dist.irecv(piece, before, group=self.group)) for piece in _pieces(parts[origin])]
            for origin in sent[1:]
        ]
        sending = [dist.isend(piece, after, group=self.group) for piece in _pieces(parts[self.rank])]
        for number, coming in enumerate(arriving):
            for piece, work in coming:
                wait_for(work)
                # What the next rank has made itself comes last, and is not sent back to it.
                if number + 1 < len(arriving):
                    sending.append(dist.isend(piece, after, group=self.group))
        for work in sending:
            wait_for(work)

    def _turns(self) -> list[tuple[int, int]]:
        """Whom this rank sends to and receives from in turn: at any time every rank sends to another one."""
        size = len(self.ranks)
        return [((self.rank + by) % size, (self.rank - by) % size) for by in range(1, size)]

    def _exchange(self, rounds: Iterable["Exchange"]) -> Iterator[None]:
        """Do the rounds in order, and yield for each when its tensor has come. Every rank has equally many, of equal sizes.

        A rank that is two rounds with everybody ahead of what has come to it waits. Small tensors in turn keep all connections
        busy at one speed: of large ones some arrive late, when the cables of the others are idle, which with four hosts took a
        quarter longer (``benchmarks/hosts``).
        """
        ahead = 2 * (len(self.ranks) - 1)
        sending: list[dist.Work] = []
        arriving: list[dist.Work | None] = []
        for one in rounds:
            # The receive first: gloo was measured to send in one direction at a time where both ends sent before they received.
            is_coming = one.received.numel() > 0
            arriving.append(dist.irecv(one.received, self.ranks[one.origin], group=self.group) if is_coming else None)
            if one.sent.numel():
                work = dist.isend(one.sent, self.ranks[one.to], group=self.group)
                assert work is not None, "None is for ranks outside of the group"
                sending.append(work)
            if len(arriving) > ahead:
                wait_for(arriving.pop(0))
                yield
        for work_of_round in arriving:
            wait_for(work_of_round)
            yield
        for work in sending:
            wait_for(work)

    def _post(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """Give ``sent[r]`` to rank r and start to get ``received[r]`` from it, for all other ranks.

        Receives come first: gloo was measured to send in one direction at a time where both ends had posted their send before
        their receive, which takes twice as long. Sends go round: at any time every rank sends to another one.
        """
        size = len(self.ranks)
        if any(one.is_cuda for one in (*sent, *received)):
            return self._post_batch(sent, received)
        work: list[dist.Work] = []
        for by in range(1, size):
            peer = (self.rank - by) % size
            if received[peer].numel():
                receiving = dist.irecv(received[peer], self.ranks[peer], group=self.group)
                assert receiving is not None, "None is for ranks outside of the group"
                work.append(receiving)
        for by in range(1, size):
            peer = (self.rank + by) % size
            if sent[peer].numel():
                sending = dist.isend(sent[peer], self.ranks[peer], group=self.group)
                assert sending is not None
                wait_for(sending)
        return work

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``."""
        received[self.rank].copy_(sent[self.rank])
        for handle in self._post(sent, received):
            wait_for(handle)

    def _post_batch(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """The same in one call: nccl must be told of all sends and receives at once, or ranks wait for each other."""
        others = [(number, rank) for number, rank in enumerate(self.ranks) if number != self.rank]
        work = [dist.P2POp(dist.irecv, received[n], rank, self.group) for n, rank in others if received[n].numel()]
        work += [dist.P2POp(dist.isend, sent[n], rank, self.group) for n, rank in others if sent[n].numel()]
        return dist.batch_isend_irecv(work) if work else []

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        size = len(self.ranks)
        work = [
            dist.P2POp(dist.irecv, received, self.ranks[(self.rank - by) % size], self.group),
            dist.P2POp(dist.isend, sent, self.ranks[(self.rank + by) % size], self.group),
        ]
        for handle in dist.batch_isend_irecv(work):
            wait_for(handle)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``."""
        with waiting():
            dist.broadcast(tensor, self.ranks[source], group=self.group)
