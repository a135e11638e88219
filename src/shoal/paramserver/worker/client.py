"""A worker's side of the wire: work units, weights and gradients, from whichever server answers for a shard at the moment.

Everything is retried until it is answered or its deadline is over. That is safe because a push is known by worker and number, a
commit by its push, a take by what the worker holds. When a server dies the next view says who answers for its shards; the
worker only sees that one of its requests took longer.
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.node import Node
from shoal.comm.wire.peer import Answer, Peer
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.elastic.view import View
from shoal.paramserver.contact import Contact
from shoal.paramserver.log.leader import PARK_SECONDS
from shoal.paramserver.messages import (
    FINISHED,
    Commit,
    Committed,
    Message,
    Packed,
    Part,
    Pull,
    Pulled,
    Push,
    Remember,
    Remembered,
    Take,
    Taken,
)
from shoal.paramserver.pushcodec import PushCompressor
from shoal.paramserver.records import PushRecord, Read, WorkUnit
from shoal.paramserver.sparse import RowPacker
from shoal.paramserver.waiting import ATTEMPT_SECONDS, Moved, seconds_for

_LOG_SHARD = 0

M = TypeVar("M", bound=Message)


class GradientRefused(RunError):
    """A server does not take this gradient; no weight was touched."""


class RunOver(Exception):
    """The run has ended while this worker was still at work."""


class Client:
    """See the module.

    Args:
        node: this worker on the wire.
        contact: to the center; ``contact.run()`` must be running.
        weights: all shards, one after the other, in one row; ``pull`` writes here.
        slices: of each shard in that row.
        cache_staleness: shards that are cached are not pulled again while they are at most so many versions behind the first.
        packer: finds the rows that a gradient touches; None: gradients are sent whole.
        compressor: encodes gradients; None: they are sent as they are. It leaves nothing for a packer to do.
        caches_cold: only those that the packer finds cold are cached; left out, all but the first.
        deadline_seconds: the longest wait for a server, beside what payloads take.
        attempt_seconds: after which a request counts as lost and is sent again, beside what its payload takes.
        tell: takes a line for people; left out, it goes to stderr.
    """

    def __init__(
        self,
        node: Node,
        contact: Contact,
        *,
        weights: Tensor,
        spans: Sequence[slice],
        cache_staleness: int = 0,
        packer: RowPacker | None = None,
        compressor: PushCompressor | None = None,
        caches_cold: bool = False,
        deadline_seconds: float,
        attempt_seconds: float = ATTEMPT_SECONDS,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._tell = tell or _tell
        self._node = node
        self._contact = contact
        self._weights = weights
        self._spans = tuple(spans)
        self._cache_staleness = cache_staleness
        self._deadline = deadline_seconds
        self._attempt = attempt_seconds
        self.num_pushes = 0
        """Gradients that were sent, or are being sent."""
        self._packer, self._compressor = packer, compressor
        assert packer is not None or not caches_cold, "who measures is who packs"
        self._caches_cold = caches_cold
        self.num_pushed_bytes = self.num_pulled_bytes = 0
        """Gradients and weights that went over, without what was sent again because nobody had answered."""
        self.num_kept_bytes = 0
        """Residuals that went over for checkpoints."""
        self._is_recalled = False
        self.versions = [-1] * len(self._spans)
        self.closed = 0
        """Updates that were closed when a push of this worker was committed last."""

    def residual_norm(self) -> float | None:
        """Of what the codec has not sent; None where there is none, or it keeps nothing. Callable from any thread."""
        return None if self._compressor is None else self._compressor.residual_norm()

    async def take(self, held: Sequence[int] = ()) -> WorkUnit | None:
        """The next work unit; None when there is nothing more to do before what is held is committed, if anything is.

        Args:
            held: numbers of the work units that this worker has taken and not committed.
        """
        notice = Deadline(seconds=self._deadline)
        while True:
            answer = await self._ask(_LOG_SHARD, Take(held=tuple(held)), seconds=3 * PARK_SECONDS)
            taken = _expect(answer, Taken)
            if not taken.ask_again or taken.must_commit:
                return taken.unit
            if notice.is_over:
                # Not an error: a step may take long. But whoever looks is told whose.
                self._tell(f"nothing to do for {self._deadline:g} s: waiting for {taken.reason}")
                notice = Deadline(seconds=self._deadline)

    async def pull(self, need: int, bound: int | None = None) -> Read:
        """Bring the weights up to a version at least; what they are then, to be told with what is computed from them.

        Args:
            need: of the shards that are always read fresh: all but those that are cached.
            bound: of those that are cached; ``need`` when left out.
        """
        cached = self._cached()
        fresh = [shard for shard in range(len(self._spans)) if shard not in cached]
        await asyncio.gather(*(self._pull(shard, need) for shard in fresh))
        # Measured against what was just read: whatever the servers do meanwhile, these two are not further apart.
        least = max(need if bound is None else bound, self.versions[_LOG_SHARD] - self._cache_staleness)
        old = [shard for shard in cached if self.versions[shard] < max(least, 0)]
        await asyncio.gather(*(self._pull(shard, least) for shard in old))
        return tuple(self.versions)

    def is_enough(self, read: Read, need: int, bound: int) -> bool:
        """Whether weights that were read before are as new as ``pull`` would have to bring them."""
        cached = self._cached()
        least = max(bound, read[_LOG_SHARD] - self._cache_staleness)
        return all(version >= (least if shard in cached else need) for shard, version in enumerate(read))

    def _cached(self) -> list[int]:
        """The shards that may be behind; never the first, by which that is measured."""
        if not self._cache_staleness:
            return []
        others = range(1, len(self._spans))
        if not self._caches_cold or self._packer is None:
            return list(others)
        cold = self._packer.cold_shards()
        return [shard for shard in others if shard in cold]

    async def push(self, gradient: Tensor, *, read: Read, unit: int = 0) -> int:
        """Bring a gradient, laid out as the weights are, to all servers; the push's number.

        Args:
            gradient: all shards, one after the other.
            read: the weights that it was computed from, as the pull said that brought them. Newer ones may be here by now.
            unit: the first work unit that it is of.

        Raises:
            GradientRefused: it is not finite, or not of this model.
        """
        number, self.num_pushes = self.num_pushes, self.num_pushes + 1
        assert len(read) == len(self._spans), f"{len(read)} versions for {len(self._spans)} shards"
        encoded: Sequence[tuple[Packed, Tensor]] | None = None
        if self._compressor is not None:
            await self._recall_residual(self._compressor)
            kept_before = self._compressor.num_kept_bytes
            # Once, and in a thread: what is sent again has the same bytes, and who is silent for seconds is taken for dead.
            encoded = await asyncio.to_thread(self._compressor.encode, gradient, self._spans, unit)
        await asyncio.gather(
            *(
                self._push(
                    Push(shard=shard, number=number, version=read[shard]),
                    gradient[span],
                    None if encoded is None else encoded[shard],
                )
                for shard, span in enumerate(self._spans)
            )
        )
        if self._compressor is not None:
            # Beside what is learned from: the codec's formula is of that.
            kept = self._compressor.num_kept_bytes - kept_before
            self.num_kept_bytes, self.num_pushed_bytes = self.num_kept_bytes + kept, self.num_pushed_bytes - kept
        return number

    async def _recall_residual(self, compressor: PushCompressor) -> None:
        """Before the first push: begin with what the checkpoint has that the run goes on from."""
        if self._is_recalled or not compressor.asks_for_residual:
            return
        for shard in range(len(self._spans)):
            into = torch.empty(compressor.num_kept(shard))
            if not into.numel():
                continue
            answer = await self._ask(shard, Remember(shard=shard, index=compressor.index), into=into)
            if _expect(answer, Remembered).has_residual:
                compressor.take(shard, into)
        self._is_recalled = True

    async def _push(self, push: Push, gradient: Tensor, encoded: tuple[Packed, Tensor] | None) -> None:
        payload = gradient
        if encoded is not None:
            packed, payload = encoded
            push = msgspec.structs.replace(push, packed=packed)
        elif self._packer is not None:
            rows, payload = self._packer.pack(push.shard, gradient)
            push = msgspec.structs.replace(push, rows=rows)
        await self._ask(push.shard, push, payload=payload)
        self.num_pushed_bytes += payload.nbytes

    async def commit(self, push: PushRecord) -> bool:
        """Say that a push is whole; False when it is not used, because somebody else was first or it is too old."""
        committed = _expect(await self._ask(_LOG_SHARD, Commit(push=push)), Committed)
        self.closed = max(self.closed, committed.closed)
        if self._compressor is not None:
            self._compressor.settle(is_kept=committed.is_kept)
        return committed.is_kept

    async def pull_now(self) -> None:
        """Bring the weights as they are now, whatever their version: programs change them between two versions."""
        self.versions = [-1] * len(self._spans)
        await self.pull(0)

    async def add_part(self, gradient: Tensor, *, evaluation: int, unit: int, loss: float) -> None:
        """Bring the gradient of one work unit of a batch to all servers.

        Raises:
            GradientRefused: it is not finite, and its loss is.
        """
        is_finite = math.isfinite(gradient.sum().item()) or bool(gradient.isfinite().all())
        parts = (
            Part(shard=shard, evaluation=evaluation, unit=unit, loss=loss, is_finite=is_finite)
            for shard in range(len(self._spans))
        )
        await asyncio.gather(*(self._ask(one.shard, one, payload=gradient[self._spans[one.shard]]) for one in parts))
        self.num_pushed_bytes += gradient.nbytes

    async def _pull(self, shard: int, need: int) -> None:
        span, have = self._weights[self._spans[shard]], self.versions[shard]
        # An answer that breaks off has put a part of a newer version here already: from then on there is none.
        self.versions[shard] = -1
        first, again = (Pull(shard=shard, need=need, have=known) for known in (have, -1))
        answer = await self._ask(shard, first, again=again, into=span)
        pulled = _expect(answer, Pulled)
        if pulled.is_new != (answer.payload is not None):
            raise RunError(
                f"pull of shard {shard}: the server says {'new weights' if pulled.is_new else 'nothing new'} and sent "
                f"{'none' if answer.payload is None else 'some'}; run one release everywhere"
            )
        # Nothing new: what is here stays here, and a server that took over may know less of it than this worker.
        self.versions[shard] = pulled.version if pulled.is_new else have
        self.num_pulled_bytes += span.nbytes if pulled.is_new else 0

    async def _ask(
        self,
        shard: int,
        message: Message,
        *,
        again: Message | None = None,
        payload: Tensor | None = None,
        into: Tensor | None = None,
        seconds: float | None = None,
    ) -> Answer:
        """Ask whoever answers for a shard, until somebody does.

        Args:
            shard: whose primary.
            message: what.
            again: what is asked after an attempt that failed, where that is something else.
            payload: sent with it.
            into: where an answer's payload goes.
            seconds: of one attempt, where that is not the usual.

        Raises:
            RunError: nobody did within the deadline; names the server. No answer waits for other workers: a work unit is given
            out
                when the updates that it needs are closed, and the servers have only to apply them.
        """
        limit, started = Deadline(seconds=self._deadline), time.monotonic()
        while True:
            self._contact.check()
            view = self._contact.view
            assert view is not None, "a worker asks servers only when it has a view"
            member = view.chains[shard].primary
            # All shards cross this worker's link at once, and what is pushed crosses another to every backup before the answer.
            num_trips = len(view.chains[shard].replicas) if payload is not None else int(into is not None)
            allowed = seconds_for(num_trips * self._weights.nbytes, base=self._attempt)
            call = self._peer(view, member).call(
                message, key=f"shard/{shard}", payload=payload, into=into, deadline=seconds or allowed
            )
            try:
                return await self._contact.while_needed(call, partial(_answers_for, member, shard))
            except WireTimeout as error:
                trouble = str(error)
            except Moved:
                trouble = "a new view came"
            except Refused as refused:
                if refused.code in ("not-finite", "shape"):
                    raise GradientRefused(refused.text) from refused
                trouble = f"{refused.code}: {refused.text}"
            if self._contact.halt == FINISHED:
                raise RunOver
            if limit.is_over:
                raise RunError(
                    f"{type(message).__name__.lower()} of shard {shard}: server {view.member(member).name} did not do it within "
                    f"{max(self._deadline, time.monotonic() - started):.3g} s, in epoch {view.epoch}: {trouble}"
                )
            message = again or message
            await self._contact.newer_than(view.epoch, 0.02)

    def _peer(self, view: View, member: str) -> Peer:
        return self._node.connect(view.member(member).address)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _answers_for(member: str, shard: int, view: View) -> bool:
    return view.chains[shard].primary == member


def _expect(answer: Answer, kind: type[M]) -> M:
    assert isinstance(answer.body, kind), f"{type(answer.body).__name__} is no answer here"
    return answer.body


# The wire in a thread of its own, for a worker whose first thread computes: calls go over, answers come back.
#
# torch lets go of the interpreter while it computes, so signs of life, retries and transfers go on meanwhile.

T = TypeVar("T")
_END_SECONDS = 10.0


class LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self, name: str = "wire") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin something over there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something over there, and wait for it."""
        return self.start(work).result()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End the loop, after one last thing; what is still under way is given up."""
        try:
            if last is not None:
                self.call(last())
        finally:
            self.call(_give_up())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _give_up() -> None:
    """End everything else in this loop: a task that is left in a loop that has stopped is complained about by the interpreter."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        done, _ = await asyncio.wait(others, timeout=_END_SECONDS)
        # Asked for what they failed of: asyncio says it on the screen of those that nobody asked.
        _ = [task.exception() for task in done if not task.cancelled()]
