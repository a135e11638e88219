"""Tensors from stage to stage: sent without waiting, received into memory that was waiting for them.

Between two ranks there is one tag for activations and one for gradients of each stage, and messages of a tag arrive in the
order in which they were sent. The first message of a kind comes with a header of its shapes and types, and later ones do not;
another kind of microbatch, such as a shorter one, has shapes of its own.

A tensor arrives with its dims in memory in the order in which they were: which way a kernel adds up depends on that, so a
transposed activation that became a plain one on its way would have other bits from there on than in one process. An expanded
one, as the gradient of a sum is, is sent whole and expanded again on arrival.
"""

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.channel import PeerLost
from shoal.comm.trafficcounter import TrafficCounter, waiting
from shoal.core.axes import Axis

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.complex64,
)
_HEADER = 64
"""Numbers of a header; enough for seven tensors of six dims."""
_BASE, _MOST_DIMS = 16, 14
"""Of the number that an order of dims is written as: 14 digits of four bits, and the bit beside it, are a number of 64 bits."""

_DIMS_BASE = 128
"""More than torch has dims: below it the number of dims is written, above it which of them are expanded."""


@dataclass(frozen=True)
class TensorMeta:
    """What is known of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    order: tuple[int, ...] = ()
    """Its dims as they lie in memory, from the outermost to the innermost; empty for a plain tensor."""
    expanded: tuple[int, ...] = ()
    """The dims along which it is one slice, shown many times."""

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for it, which is dense, and the tensor that this memory is."""
        if not self.order:
            plain = torch.empty(self.shape, dtype=self.dtype, device=device)
            return plain, plain
        memory = torch.empty([self.shape[dim] for dim in self.order], dtype=self.dtype, device=device)
        return memory, self._in_place(memory)

    def expand(self, tensor: Tensor) -> Tensor:
        """What has arrived, as it lay in memory; a later message of its kind need not be expanded, which its values show."""
        if not self.expanded:
            return tensor
        one = _first_of(tensor, self.expanded)
        one = self._in_place(one.permute(self.order).contiguous()) if self.order else one.contiguous()
        found = one.expand(self.shape)
        return found if torch.equal(found, tensor) else tensor

    def _in_place(self, memory: Tensor) -> Tensor:
        """Dims that are as in memory, in their own order."""
        return memory.permute([self.order.index(dim) for dim in range(len(self.order))])


@dataclass(frozen=True)
class Endpoint:
    """Where messages of one stage come from or go to."""

    peer: int
    """The rank along ``pp``."""
    tag: int


MessageMeta = tuple[TensorMeta, ...]


class Message:
    """Tensors on their way to this rank."""

    def __init__(self, p2p: "PointToPoint", endpoint: Endpoint, kind: Hashable) -> None:
        self._p2p, self._endpoint, self._kind = p2p, endpoint, kind
        self._tensors: list[Tensor] = []
        self._work: list[dist.Work] = []
        # A endpoint is first in, first out: nothing is posted past a message whose meta is not known yet.
        if (endpoint, kind) in p2p.metas and not p2p.unposted[endpoint]:
            self._post(p2p.metas[endpoint, kind])
        else:
            p2p.unposted[endpoint] += 1

    def open(self) -> tuple[list[Tensor], MessageMeta]:
        """The tensors, once they are here."""
        key = (self._endpoint, self._kind)
        if key not in self._p2p.metas:
            header = torch.zeros(_HEADER, dtype=torch.int64)
            self._p2p.wait(self._p2p.receive(header, self._endpoint), self._endpoint)
            self._p2p.metas[key] = read_header(header)
        if not self._work:
            self._p2p.unposted[self._endpoint] -= 1
            self._post(self._p2p.metas[key])
        for work in self._work:
            self._p2p.wait(work, self._endpoint)
        meta = self._p2p.metas[key]
        return [part.expand(tensor) for part, tensor in zip(meta, self._tensors, strict=True)], meta

    def _post(self, meta: MessageMeta) -> None:
        made = [part.empty(self._p2p.device) for part in meta]
        self._tensors = [tensor for _, tensor in made]
        self._work = [self._p2p.receive(memory, self._endpoint) for memory, _ in made]


class PointToPoint:
    """This rank's endpoints along ``pp``."""

    def __init__(
        self, group: dist.ProcessGroup, *, traffic: TrafficCounter, device: torch.device, deadline_seconds: float
    ) -> None:
        self.device = device
        self.metas: dict[tuple[Endpoint, Hashable], MessageMeta] = {}
        self.unposted: Counter[Endpoint] = Counter()
        """Messages that are expected and have no memory waiting for them yet."""
        self._told: dict[tuple[Endpoint, Hashable], MessageMeta] = {}
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._traffic = traffic
        self._deadline = deadline_seconds
        self._unsent: deque[tuple[dist.Work, Tensor, Endpoint, int]] = deque()

    def agree(self, endpoint: Endpoint, kind: Hashable, meta: MessageMeta) -> None:
        """Say what messages of a kind are like in both directions, where both sides know it; nothing is sent for it."""
        self.metas[endpoint, kind] = self._told[endpoint, kind] = meta

    def expect(self, endpoint: Endpoint, kind: Hashable) -> Message:
        """Get ready for the next message of a endpoint."""
        return Message(self, endpoint, kind)

    def send(
        self, tensors: Sequence[Tensor], endpoint: Endpoint, kind: Hashable, *, needed_at: int = 0, called: str = "send"
    ) -> None:
        """Hand tensors over; they must not be written to before ``flush``.

        Args:
            tensors: one message.
            endpoint: where to.
            kind: tells microbatches of different shapes apart, the same on both sides.
            needed_at: when the other rank will need it, by a count of its own (``release``).
            called: the traffic counter's name for it.
        """
        if (endpoint, kind) not in self._told:
            header = write_header(tensors)
            self._told[endpoint, kind] = read_header(header)
            self._post(header, endpoint, needed_at)
        for tensor, part in zip(tensors, self._told[endpoint, kind], strict=True):
            self._traffic.note(Axis.PIPELINE, called, tensor.nbytes)
            # In the order that was told, whatever this one's is.
            in_memory = tensor.detach().permute(part.order) if part.order else tensor.detach()
            self._post(in_memory.contiguous(), endpoint, needed_at)

    def release(self, peer: int, reached: int) -> None:
        """Give back what the other rank has taken, known from how far it has come.

        A send is never waited for otherwise before ``flush``: where both ranks are ahead of each other, as in a breadth-first
        schedule, each would wait for the other to receive.
        """
        kept: deque[tuple[dist.Work, Tensor, Endpoint, int]] = deque()
        for work, tensor, endpoint, needed_at in self._unsent:
            if endpoint.peer == peer and needed_at <= reached:
                self.wait(work, endpoint, shown="send")
            else:
                kept.append((work, tensor, endpoint, needed_at))
        self._unsent = kept

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._unsent:
            self._settle()

    def receive(self, tensor: Tensor, endpoint: Endpoint) -> dist.Work:
        """Post a receive."""
        work = dist.irecv(tensor, self._ranks[endpoint.peer], group=self._group, tag=endpoint.tag)
        assert work is not None
        return work

    def wait(self, work: dist.Work, endpoint: Endpoint, *, shown: str = "receive") -> None:
        """Wait for a message; ``shown`` is what spans call that.

        Raises:
            PeerLost: the other rank died or did not come.
        """
        try:
            with self._traffic.wait(Axis.PIPELINE, "send", shown=shown), waiting():
                work.wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            rank = self._ranks[endpoint.peer]
            raise PeerLost(
                f"rank {rank} was lost, or silent for {self._deadline:g} s, in the middle of a pipeline step: {error}",
                ranks=[rank],
            ) from error

    def _post(self, tensor: Tensor, endpoint: Endpoint, needed_at: int) -> None:
        work = dist.isend(tensor, self._ranks[endpoint.peer], group=self._group, tag=endpoint.tag)
        assert work is not None
        self._unsent.append((work, tensor, endpoint, needed_at))

    def _settle(self) -> None:
        work, _, endpoint, _ = self._unsent.popleft()
        self.wait(work, endpoint, shown="send")


def message_problem(tensors: Sequence[Tensor]) -> str | None:
    """Why these tensors cannot be one message, with both numbers; None where they can."""
    # As write_header writes them.
    size = 1 + sum(3 + tensor.ndim for tensor in tensors)
    if size > _HEADER:
        return (
            f"{len(tensors)} tensors, whose shapes and types take {size} numbers, and a message's header has {_HEADER}"
        )
    strange = next((tensor.dtype for tensor in tensors if tensor.dtype not in _DTYPES), None)
    if strange is not None:
        return f"a tensor of {strange}, which is not one of the {len(_DTYPES)} types that are sent"
    return None


def write_header(tensors: Sequence[Tensor]) -> Tensor:
    """Shapes and types as numbers: nothing on a wire is code."""
    assert message_problem(tensors) is None, message_problem(tensors)
    numbers = [len(tensors)]
    for tensor in tensors:
        facts = int(tensor.requires_grad) + 2 * _number_of(order_of(tensor))
        dims = tensor.ndim + _DIMS_BASE * sum(1 << dim for dim in expanded_dims(tensor))
        numbers += [_DTYPES.index(tensor.dtype), facts, dims, *tensor.shape]
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def read_header(header: Tensor) -> MessageMeta:
    """The reverse of ``write_header``."""
    numbers = header.tolist()
    count, at, parts = numbers[0], 1, []
    for _ in range(count):
        dtype, facts, dims = numbers[at : at + 3]
        expanded, ndim = divmod(dims, _DIMS_BASE)
        shape, order = tuple(numbers[at + 3 : at + 3 + ndim]), _order_of_number(facts // 2)
        along = tuple(dim for dim in range(ndim) if expanded >> dim & 1)
        parts.append(TensorMeta(shape, _DTYPES[dtype], bool(facts % 2), order, along))
        at += 3 + ndim
    return tuple(parts)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dims of a tensor as they lie in memory, of an expanded one those of its slice; empty where that is their own order."""
    strides = tensor.stride()
    if tensor.ndim > _MOST_DIMS or _first_of(tensor, expanded_dims(tensor)).is_contiguous():
        return ()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(tensor.ndim)) else order


def expanded_dims(tensor: Tensor) -> tuple[int, ...]:
    """The dims along which a tensor is one slice, shown many times."""
    if tensor.ndim > _MOST_DIMS:
        return ()
    return tuple(dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0)


def _first_of(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The first slice along some dims, which stay."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _number_of(order: Sequence[int]) -> int:
    """An order as a number, which is 0 for the empty one: a digit for each dim, counted from 1."""
    return sum((dim + 1) * _BASE**place for place, dim in enumerate(order))


def _order_of_number(number: int) -> tuple[int, ...]:
    digits = []
    while number:
        number, digit = divmod(number, _BASE)
        digits.append(digit - 1)
    return tuple(digits)
