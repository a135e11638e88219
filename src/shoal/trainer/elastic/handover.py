"""How parts of a step's state get to the ranks that lack them: point to point, from one holder each, and nothing else moves.

A rank works out which boxes of which shards make up what it needs, and asks one holder for each that it does not have itself.
Everybody hears all requests, so both ends of a transfer cut the same bytes into the same messages:

    several small pieces, or a range of a large one | 8 bytes: a hash of what is before them

Every rank goes through its own messages in the order that all of them have, with a few under way at once. So the first message
that is not through is under way at both ends, and no order of transfers can make ranks wait for each other in a circle. A joining
rank of n costs one copy of what it lacks between two ranks, whatever n is; those that hold everything only wait for it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from shoal.checkpoint.boxes import intersect, subtract
from shoal.checkpoint.holdings import Cut, Listing
from shoal.checkpoint.pieces import view_cuts
from shoal.checkpoint.shard import ITEM_BYTES
from shoal.comm.channel import PeerLost
from shoal.comm.full_tensor import box
from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.engine.state import RankState

MESSAGE_BYTES = 16 * 2**20
"""Of a message, without its hash."""
_HASH_BYTES = 8
_UNDER_WAY = 4
"""Messages of a rank that are started and not through."""


@dataclass(frozen=True, kw_only=True)
class BoxRequest:
    """A box of a tensor, out of one shard."""

    shard: int
    cut: Cut


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """A range of a piece's bytes."""

    piece: int
    """Its number among the reader's."""
    start: int
    stop: int
    size: int
    """Of the piece."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one rank sends another at once."""

    source: int
    reader: int
    parts: tuple[ByteRange, ...]

    @property
    def num_bytes(self) -> int:
        """With its hash."""
        return sum(part.stop - part.start for part in self.parts) + _HASH_BYTES


def plan_pieces(need: Cut, listings: Sequence[Listing], order: Sequence[int]) -> list[BoxRequest]:
    """Pieces that make up a box, each element once.

    Args:
        need: the box.
        listings: of all shards.
        order: the shards that it is taken from, those before before those behind.

    Raises:
        RunError: they do not have all of it.
    """
    rest, found = [need.box], list[BoxRequest]()
    for shard in order:
        held = listings[shard].get(need.name)
        for has in () if held is None else held.boxes:
            shared = [(one, intersect(one, has)) for one in rest]
            found += [
                BoxRequest(shard=shard, cut=Cut(name=need.name, shape=need.shape, box=both))
                for _, both in shared
                if both is not None
            ]
            rest = [left for one, _ in shared for left in subtract(one, has)]
        if not rest:
            return found
    raise RunError(f"nobody holds {rest[0]} of {need.name!r}")


def cut_messages(
    source: int, reader: int, sizes: Mapping[int, int], *, limit: int = MESSAGE_BYTES
) -> Iterator[Message]:
    """The messages from one rank to another.

    Args:
        source: the rank that sends.
        reader: the rank that receives.
        sizes: bytes of the pieces that it sends, by their number among the reader's.
        limit: bytes of a message.
    """
    parts, room = list[ByteRange](), limit
    for piece, size in sizes.items():
        for start in range(0, size, limit):
            stop = min(size, start + limit)
            if stop - start > room:
                yield Message(source=source, reader=reader, parts=tuple(parts))
                parts, room = [], limit
            parts.append(ByteRange(piece=piece, start=start, stop=stop, size=size))
            room -= stop - start
    if parts:
        yield Message(source=source, reader=reader, parts=tuple(parts))


def num_bytes(cut: Cut, listings: Sequence[Listing], shard: int) -> int:
    """Of a piece."""
    return ITEM_BYTES[listings[shard][cut.name].dtype] * cut.box.num_elements


def transfer(
    messages: Iterable[Message],
    *,
    world: World,
    read: Callable[[int, int], Tensor],
    write: Callable[[int, Tensor], None],
) -> None:
    """Send and receive this rank's messages. All ranks that have one in the list call it.

    Args:
        messages: of all ranks, in the same order on every rank.
        world: the ranks.
        read: the bytes of a reader's piece, by the rank of the reader and the number of the piece.
        write: takes the bytes of one of this rank's own pieces.

    Raises:
        PeerLost: a message is not what was sent.
    """
    started = deque[tuple[Message, Tensor, dist.Work | None]]()
    outgoing, incoming = _Outgoing(read), _Incoming(write)
    for message in messages:
        if world.rank not in (message.source, message.reader):
            continue
        if len(started) == _UNDER_WAY:
            _finish(*started.popleft(), world=world, incoming=incoming)
        if message.source == world.rank:
            buffer = outgoing.pack(message)
            work = dist.isend(buffer, dst=message.reader, group=world.group)
        else:
            buffer = torch.empty(message.num_bytes, dtype=torch.uint8)
            work = dist.irecv(buffer, src=message.source, group=world.group)
        started.append((message, buffer, work))
    while started:
        _finish(*started.popleft(), world=world, incoming=incoming)


def _finish(message: Message, buffer: Tensor, work: dist.Work | None, *, world: World, incoming: "_Incoming") -> None:
    if work is not None:
        work.wait()
    if message.reader == world.rank:
        incoming.unpack(message, buffer)


class _Outgoing:
    """Fills messages. The last piece is kept: the next message may go on with it."""

    def __init__(self, read: Callable[[int, int], Tensor]) -> None:
        self._read = read
        self._last: tuple[tuple[int, int], Tensor] | None = None

    def pack(self, message: Message) -> Tensor:
        """The bytes of a message."""
        buffer, at = torch.empty(message.num_bytes, dtype=torch.uint8), 0
        for part in message.parts:
            size = part.stop - part.start
            buffer[at : at + size] = self._bytes(message.reader, part.piece)[part.start : part.stop]
            at += size
        buffer[at:] = _hash(buffer[:at])
        return buffer

    def _bytes(self, reader: int, piece: int) -> Tensor:
        if self._last is None or self._last[0] != (reader, piece):
            self._last = (reader, piece), self._read(reader, piece)
        return self._last[1]


class _Incoming:
    """Takes messages apart, and large pieces together."""

    def __init__(self, write: Callable[[int, Tensor], None]) -> None:
        self._write = write
        self._open: dict[int, list[Tensor]] = {}
        """The ranges of pieces that are not whole yet."""

    def unpack(self, message: Message, buffer: Tensor) -> None:
        """Write what is whole.

        Raises:
            PeerLost: the hash says that these are other bytes.
        """
        body = buffer[:-_HASH_BYTES]
        if not torch.equal(_hash(body), buffer[-_HASH_BYTES:]):
            raise PeerLost(
                f"rank {message.source} sent a part of the state that arrived as something else", ranks=[message.source]
            )
        at = 0
        for part in message.parts:
            size = part.stop - part.start
            self._open.setdefault(part.piece, []).append(body[at : at + size])
            at += size
            if part.stop == part.size:
                # A copy, which begins where a number of any type may begin.
                self._write(part.piece, torch.cat(self._open.pop(part.piece)))


def view_of(state: RankState, cut: Cut) -> Tensor:
    """A piece that a rank holds, in its own tensor."""
    return view_cuts(state.tensors, state.placements, [cut])[cut]


def piece_bytes(state: RankState, cut: Cut) -> Tensor:
    """The bytes of a piece that a rank holds, in the processor's memory."""
    return view_of(state, cut).to("cpu").contiguous().reshape(-1).view(torch.uint8)


def write_piece(target: Tensor, data: Tensor) -> None:
    """Put the bytes of a piece into the box of a live tensor that it is of."""
    target.copy_(data.view(target.dtype).reshape(target.shape))


def digest_of(state: RankState) -> str:
    """A hash of everything that a rank has of a state: equal for two that have the same parts with the same bits."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(state.tensors.items()):
        found.update(name.encode())
        for patch in state.placements[name].patches:
            part = tensor.detach()[box(patch.local_start, patch.shape)]
            found.update(part.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _hash(data: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(data.numpy().data)), dtype=torch.uint8)
