"""One shard on one server: its state, whoever waits for its next version, and the lock that keeps readers from a half update.

The lock is held while the shard changes, never while anything is sent: weights are lent to whoever reads them
(``SnapshotReads``).

A backup that is being made takes pushes before it has its shard: they wait here, so that nobody waits for the copy.
"""

import asyncio
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import RunError
from shoal.paramserver.messages import Packed
from shoal.paramserver.records import PushId, Update
from shoal.paramserver.server.gradients import NotFinite, WorkerGone
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.sparse import Index, WrongGradient, unpack_rows
from shoal.paramserver.waiting import ChangeEvent

SMALL = 1 << 18
"""Elements up to which an update is made at once; a larger one goes to a thread, so that the wire does not wait for it."""

T = TypeVar("T")


class Replica:
    """A shard's primary, backup, or a backup that is still being made.

    Args:
        state: the shard; None while it is on its way.
        order: the epoch under which it was ordered from another server; 0: it was made here.
    """

    def __init__(self, state: ShardState | None, *, order: int = 0) -> None:
        self._state = state
        self.order = order
        self._early: list[tuple[PushId, bytes, int, Index, Packed | None]] = []
        self.lock = asyncio.Lock()
        self._snapshot_reads = SnapshotReads()
        self.changed = ChangeEvent()
        self.ready = asyncio.Event()
        if state is not None:
            self.ready.set()

    @property
    def state(self) -> ShardState:
        """The shard; to be asked for only when ``ready``."""
        assert self._state is not None, "the shard is still on its way"
        return self._state

    @property
    def version(self) -> int:
        """Updates applied; -1 while the shard is on its way."""
        return self._state.version if self._state is not None and self.ready.is_set() else -1

    def store(
        self, identity: PushId, payload: memoryview, version: int, rows: Index = (), packed: Packed | None = None
    ) -> None:
        """Keep a copy of a pushed gradient, given as its bytes; see ``ShardState.store``.

        Args:
            identity: of the push.
            payload: the slice, or what ``rows`` or ``packed`` says of it.
            version: of the weights that it was computed with.
            rows: see ``messages.Push``.
            packed: likewise.
        """
        state = self._state
        if state is None:
            self._early.append((identity, bytes(payload), version, rows, packed))
        elif packed is not None:
            if state.codec is None or rows:
                raise WrongGradient(f"a push came as {packed.codec}, and this run compresses none, or not its rows")
            given, kept = state.codec.split_kept(as_tensor(payload, torch.uint8), packed, state.shard)
            is_new = state.store(identity, state.codec.unpack(given, packed, state.shard), version)
            if is_new and kept is not None and packed.keeper is not None and state.kept is not None:
                state.kept.store(identity, packed.keeper, kept)
        elif rows:
            given = as_tensor(payload, torch.uint8)
            rest, found = unpack_rows(given, rows, state.shard, state.model, state.weights.dtype)
            state.store(identity, rest, version, found)
        else:
            state.store(identity, as_tensor(payload, state.weights.dtype), version)

    def fill(self, state: ShardState) -> None:
        """The shard has come; what was pushed meanwhile is put into it, unless it is there already.

        What does not fit, or is not finite, is let go: the primary refuses the same bytes, so no worker was told that it is kept.
        """
        early, self._early, self._state = self._early, [], state
        for identity, payload, version, rows, packed in early:
            with contextlib.suppress(WorkerGone, NotFinite, WrongGradient, ValueError):
                self.store(identity, memoryview(payload), version, rows, packed)
        self.ready.set()
        self.changed.notify()

    async def apply(self, found: Update, lr: float) -> None:
        """Make the update of a record.

        Raises:
            RunError: a push of the update is not here. The protocol forbids it, so this replica must not go on.
        """

        def apply() -> None:
            missing = self.state.missing(found)
            if missing:
                raise RunError(f"update {found.number} needs pushes that this server never got: {missing}")
            self.state.apply(found, lr)

        await self.change(apply)
        self.changed.notify()

    async def change(self, work: Callable[[], T]) -> T:
        """Do something that may change the weights, when nothing else does; who reads them keeps those of before."""
        async with self.lock:
            other = self._snapshot_reads.take_other(self.state.weights)

            def do() -> T:
                if other is not None:
                    self.state.move_weights(other)
                return work()

            return do() if self.state.weights.numel() <= SMALL else await asyncio.to_thread(do)

    def read_snapshot(self) -> AbstractContextManager[torch.Tensor]:
        """The weights as they are now, for as long as somebody reads them; to be entered under the lock."""
        assert self.lock.locked(), "weights are lent between two changes, not in one"
        return self._snapshot_reads.read_snapshot(self.state.weights)

    async def export(self) -> tuple[bytes, torch.Tensor]:
        """Everything of the shard as text and one row of bytes."""

        def copy() -> tuple[bytes, torch.Tensor]:
            return pack(*self.state.export())

        # In a thread: it takes seconds for a large shard, and who is silent for seconds is taken for dead.
        async with self.lock:
            return await asyncio.to_thread(copy)


def pack(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> tuple[bytes, torch.Tensor]:
    """Tensors as one row of bytes, and JSON that says where each lies in it, with ``values`` beside."""
    places, rows, offset = {}, [], 0
    for name, tensor in tensors.items():
        row = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        places[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, row.numel()]
        rows.append(row)
        offset += row.numel()
    text = json.dumps({"places": places, "values": values}).encode()
    return text, torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def as_tensor(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A payload as a flat tensor, without a copy; it may be somebody else's memory, so it is read only.

    Raises:
        ValueError: it is no whole number of elements.
    """
    if not payload.nbytes:
        # Rows of a shard that a work unit did not touch; torch refuses to see a tensor in nothing.
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(payload, dtype=dtype)


def unpack(text: bytes, payload: memoryview) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Back from ``pack``; the tensors are copies.

    Raises:
        RunError: a tensor would lie outside the payload.
    """
    plain = json.loads(text)
    whole = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
    tensors = {}
    for name, (dtype, shape, offset, size) in plain["places"].items():
        if not 0 <= offset <= offset + size <= whole.numel():
            raise RunError(f"{name!r} is said to be at bytes {offset} to {offset + size} of {whole.numel()}")
        # Not a view of the row: an offset that is no multiple of the element's size cannot be one.
        tensors[name] = whole[offset : offset + size].clone().view(getattr(torch, dtype)).reshape(shape)
    return tensors, plain["values"]


# The weights of a shard while they are sent: whoever reads them keeps them as they are, and an update waits for nobody.
#
# A link may be slow, and a reader may stop in the middle. So weights are lent and not locked: an update of weights that
# somebody still reads is made in other memory, to which they are copied first. Where nobody reads, as between two steps of
# ``bsp``, it is made in its place and nothing is copied.


@dataclass(eq=False)
class _Loan:
    weights: Tensor
    num_readers: int = 0


class SnapshotReads:
    """Who reads the memory of one shard. Called from one thread."""

    def __init__(self) -> None:
        self._loan: _Loan | None = None
        """Of the memory that is current."""
        # Of a reader that was overtaken by an update: fresh memory costs more than the copy into it.
        self._spare: Tensor | None = None

    @contextmanager
    def read_snapshot(self, weights: Tensor) -> Iterator[Tensor]:
        """The current weights, which stay as they are until the end of the block."""
        if self._loan is None:
            self._loan = _Loan(weights)
        loan = self._loan
        assert loan.weights is weights, "the current weights are where they were lent last"
        loan.num_readers += 1
        try:
            yield weights
        finally:
            loan.num_readers -= 1
            if not loan.num_readers and loan is not self._loan:
                self._spare = weights

    def take_other(self, weights: Tensor) -> Tensor | None:
        """Memory for the current weights to change in, which they are in from then on; None: nobody reads them where they are."""
        if self._loan is None or not self._loan.num_readers:
            return None
        self._loan, spare, self._spare = None, self._spare, None
        return torch.empty_like(weights) if spare is None else spare
