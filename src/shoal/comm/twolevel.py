"""Collectives of a group that spans hosts and has several ranks on each: shared memory inside, one crossing between.

Ranks follow one another host by host (``hosts.has_two_levels``): rank ``h * k + j`` is number j of the k ranks of host h. Only
ranks of equal j talk between hosts, each about its share of the bytes::

    host 0            host 1            host 2
    g0 + g1  ------>  + g2 + g3 ----->  + g4 + g5          a sum goes from host to host, chunk by chunk, and every host adds its
         <------------------- the sum -------              ranks' terms to it: rank 0 + rank 1 + ... as on one host, to the bit
    gathers: every rank's part crosses once to each other host, and spreads there through shared memory

**What order costs.** An all-reduce of S bytes crosses with S each way between neighbours, which is what two hosts need in any
order (gloo's ring over the same ranks: 1.5 S with two on each). A gather crosses with 1/k of what an exchange of all ranks with
all does. A reduce-scatter between two hosts would need S/2 each way if the order were free. In the order of ranks the terms of
the second host can only be added after those of the first: S goes forward and S/2 back, three quarters of an exchange of all
with all, whose S each way takes as long on a cable that carries both ways at once.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.shared import SharedTransport
from shoal.comm.torchgroup import GATHERED_BYTES, TorchTransport, wait_for

CHUNK_BYTES = 512 * 1024
"""What a rank sends of a sum at a time: the next host adds one while the next one comes."""
_AHEAD = 3
"""Chunks of a sum that a rank waits for at once."""

_Combine = Callable[..., Tensor]


class TwoLevelTransport:
    """Moves the bytes of a group of CPU tensors over several hosts; a ``Transport``. Used by one thread at a time."""

    is_ordered = True

    def __init__(self, local: SharedTransport, group: dist.ProcessGroup) -> None:
        """``local`` is between the ranks of this host, ``group`` between all ranks, for messages from host to host only."""
        self.local = local
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.host, self.place = divmod(self.rank, local.size)
        self.num_hosts, self.per_host = self.size // local.size, local.size
        self._wire = TorchTransport(group)
        self._rail = TorchTransport(group, ranks=self.ranks[self.place :: self.per_host])
        self._group = group
        self._buffers: dict[torch.dtype, list[Tensor]] = {}

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``. The sum goes from host to host, and what is whole at the last one goes back the same way."""
        flat = tensor.data.view(-1)
        if flat.nbytes * self.size <= GATHERED_BYTES:
            self._combine_gathered(flat, torch.add)
            return
        chunks = torch.split(flat, self.per_host * self._chunk(flat.dtype))
        # What the last host gives back is behind what this one sends by a message each way for every host between.
        behind = 2 * (self.num_hosts - 1 - self.host) + (1 if self.host + 1 < self.num_hosts else 0)
        prefixes = self._expect_prefixes([self._share(chunk) for chunk in chunks])
        sending: list[dist.Work] = []
        returning: dict[int, dist.Work | None] = {}
        for number in range(len(chunks) + behind):
            if number < len(chunks):
                parts = torch.tensor_split(chunks[number], self.per_host)
                mine, carry = parts[self.place], next(prefixes)
                self.local.reduce_parts(parts, mine, carry)
                if self.host + 1 < self.num_hosts:
                    # Before the send: see ``TorchTransport._post``. It comes back into the same place, after it has left it.
                    returning[number] = self._receive(mine, self.host + 1) if mine.numel() else None
                    sending += self._send(mine, self.host + 1)
                else:
                    sending += self._send(mine, self.host - 1)
            if number >= behind:
                self._spread_sum(chunks[number - behind], returning.pop(number - behind, None), sending)
        _wait_all(sending)

    def _spread_sum(self, chunk: Tensor, arriving: dist.Work | None, sending: list[dist.Work]) -> None:
        """A chunk of the sum has come from the next host, or was made here: to the host before, and to all ranks of this one."""
        parts = torch.tensor_split(chunk, self.per_host)
        if arriving is not None:
            wait_for(arriving)
            if self.host:
                sending += self._send(parts[self.place], self.host - 1)
        self.local.all_gather(parts[self.place], chunk, [part.numel() for part in parts])

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        flat = tensor.data.view(-1)
        if flat.nbytes * self.size <= GATHERED_BYTES:
            self._combine_gathered(flat, torch.maximum)
            return
        self.local.all_reduce_max_(flat)
        parts = torch.tensor_split(flat, self.per_host)
        mine = parts[self.place]
        others = [torch.empty_like(mine) for _ in range(self.num_hosts)]
        for work in self._exchange([mine] * self.num_hosts, others):
            wait_for(work)
        for host, other in enumerate(others):
            if host != self.host:
                torch.maximum(mine, other, out=mine)
        self.local.all_gather(mine, flat, [part.numel() for part in parts])

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. Every slice goes from host to host; the last one sends it to its owner."""
        width = self._chunk(whole.dtype)
        slices = torch.split(whole.data, list(counts))
        items = [(host, start) for start in range(0, max(counts), width) for host in range(self.num_hosts)]
        by_host = [slices[host * self.per_host : (host + 1) * self.per_host] for host in range(self.num_hosts)]
        cut = [[part[start : start + width] for part in by_host[owner]] for owner, start in items]
        prefixes = self._expect_prefixes([parts[self.place] for parts in cut])
        is_last = self.host + 1 == self.num_hosts
        work: list[dist.Work] = []
        for (owner, start), parts in zip(items, cut, strict=True):
            mine, carry = parts[self.place], next(prefixes)
            if not any(part.numel() for part in parts):
                continue
            result = own[start : start + width] if is_last and owner == self.host else mine
            self.local.reduce_parts(parts, result, carry)
            if not is_last:
                if owner == self.host and mine.numel():
                    # The whole sum comes from the last host after this part of it has left, so both may be in one place.
                    work += [self._receive(own[start : start + width], self.num_hosts - 1)]
                work += self._send(mine, self.host + 1)
            elif owner != self.host:
                work += self._send(mine, owner)
        _wait_all(work)

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. A rank gets what the ranks of its place have, and gives it to those of its host."""
        slices = torch.split(whole.data, list(counts))
        mine = slices[self.rank]
        if own.numel() and own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        rail = [slices[host * self.per_host + self.place] for host in range(self.num_hosts)]
        self._rail.gather_parts(rail)
        for host, part in enumerate(rail):
            here = [counts[host * self.per_host + place] for place in range(self.per_host)]
            start = sum(counts[: host * self.per_host])
            if sum(here):
                self.local.all_gather(part, whole.data[start : start + sum(here)], here)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``. What ranks of other hosts get goes straight to them, the rest through shared memory."""
        first = self.host * self.per_host
        here = range(first, first + self.per_host)
        outgoing = [part if peer not in here else part.new_empty(0) for peer, part in enumerate(sent)]
        incoming = [part if peer not in here else part.new_empty(0) for peer, part in enumerate(received)]
        work = self._wire._post(outgoing, incoming)
        self.local.all_to_all([sent[peer] for peer in here], [received[peer] for peer in here])
        _wait_all(work)

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        self._wire.ring_shift(sent, received, by)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``. It crosses once to each other host."""
        host, place = divmod(source, self.per_host)
        flat = tensor.data.view(-1)
        if place == self.place:
            if host == self.host:
                _wait_all([work for other in self._other_hosts() for work in self._send(flat, other)])
            elif flat.numel():
                wait_for(self._receive(flat, host))
        self.local.broadcast_(flat, place)

    def close(self) -> None:
        """Give the memory back; closing twice is allowed. Any operation afterwards fails."""
        self.local.close()

    def _combine_gathered(self, flat: Tensor, combine: _Combine) -> None:
        """The first rank of each host gets all terms; everyone adds them up."""
        num = flat.numel()
        terms = flat.new_empty(self.size, num)
        by_host = [part.view(-1) for part in torch.split(terms, self.per_host)]
        self.local.all_gather(flat, by_host[self.host], [num] * self.per_host)
        if self.place == 0:
            arriving, sending = self._post([by_host[self.host]] * self.num_hosts, by_host)
            _wait_all([*arriving.values(), *sending])
        self.local.broadcast_(terms.view(-1), 0)
        flat.copy_(terms[0])
        for term in terms[1:]:
            combine(flat, term, out=flat)

    def _share(self, chunk: Tensor) -> Tensor:
        return torch.tensor_split(chunk, self.per_host)[self.place]

    def _chunk(self, dtype: torch.dtype) -> int:
        return CHUNK_BYTES // dtype.itemsize

    def _other_hosts(self) -> list[int]:
        """Beginning with the next one, so that not all send to the same host at once."""
        return [(self.host + by) % self.num_hosts for by in range(1, self.num_hosts)]

    def _peer(self, host: int) -> int:
        return self.ranks[host * self.per_host + self.place]

    def _send(self, tensor: Tensor, host: int) -> list[dist.Work]:
        if not tensor.numel():
            return []
        work = dist.isend(tensor, self._peer(host), group=self._group)
        assert work is not None, "None is for ranks outside of the group"
        return [work]

    def _receive(self, tensor: Tensor, host: int) -> dist.Work:
        work = dist.irecv(tensor, self._peer(host), group=self._group)
        assert work is not None
        return work

    def _post(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[dict[int, dist.Work], list[dist.Work]]:
        """Start to exchange with the ranks of equal place: receives by host, and sends. Receives come first."""
        arriving = {
            host: self._receive(received[host], host)
            for host in reversed(self._other_hosts())
            if received[host].numel()
        }
        return arriving, [work for host in self._other_hosts() for work in self._send(sent[host], host)]

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        arriving, sending = self._post(sent, received)
        return [*arriving.values(), *sending]

    def _expect_prefixes(self, shapes: Sequence[Tensor]) -> Iterator[Tensor | None]:
        """The sums of the hosts before, for tensors of these sizes in turn; None on the first host and for empty ones."""
        if self.host == 0:
            yield from (None for _ in shapes)
            return
        buffers = self._buffers_for(shapes)
        under_way: list[tuple[dist.Work, Tensor] | None] = []
        asked = 0
        for number in range(len(shapes)):
            # A buffer is used again when the tensor that came in it has been added, which is when the next one is asked for.
            while asked < min(number + _AHEAD, len(shapes)):
                size = shapes[asked].numel()
                into = buffers[asked % (_AHEAD + 1)][:size]
                under_way.append((self._receive(into, self.host - 1), into) if size else None)
                asked += 1
            awaited = under_way.pop(0)
            if awaited is None:
                yield None
            else:
                wait_for(awaited[0])
                yield awaited[1]

    def _buffers_for(self, shapes: Sequence[Tensor]) -> list[Tensor]:
        width = max(shape.numel() for shape in shapes)
        dtype = shapes[0].dtype
        found = self._buffers.get(dtype)
        if found is None or found[0].numel() < width:
            found = self._buffers[dtype] = [shapes[0].new_empty(width) for _ in range(_AHEAD + 1)]
        return found


def _wait_all(work: Sequence[dist.Work]) -> None:
    for one in work:
        wait_for(one)
