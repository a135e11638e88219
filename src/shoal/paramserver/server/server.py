"""A server: some shards of the weights and of the optimizer state, changed by the updates of the log that everyone
follows.

A push is stored here and at the backup, then acknowledged; it becomes part of the weights when the log says so. All replicas of a
shard follow the same log, so a backup that takes over has nothing to catch up with but what is on its way anyway.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import torch

from shoal.comm.wire.listener import Request
from shoal.comm.wire.node import Node
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.elastic.view import View
from shoal.paramserver.cleaner import Cleaner
from shoal.paramserver.contact import Contact
from shoal.paramserver.log.commands import Command, CommandLog
from shoal.paramserver.log.leader import PARK_SECONDS, LogLeader
from shoal.paramserver.log.updates import LogTrimmed
from shoal.paramserver.messages import (
    Advance,
    Commit,
    Committed,
    Done,
    Fetch,
    Fetched,
    Follow,
    Part,
    Pull,
    Pulled,
    Push,
    Recall,
    Remember,
    Remembered,
    ReplicateCommand,
    ReplicateProgram,
    ReplicatePush,
    Run,
    Settle,
    Take,
    Taken,
)
from shoal.paramserver.records import Committed as Kept
from shoal.paramserver.records import PushId, PushRecord, Update, Wait, WorkUnit
from shoal.paramserver.records import Refused as NotTaken
from shoal.paramserver.server.follower import LogFollower
from shoal.paramserver.server.gradients import NotFinite, WorkerGone
from shoal.paramserver.server.replica import Replica
from shoal.paramserver.server.replication import Replication, require_primary
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.server.store import LOG_SHARD, ShardStore
from shoal.paramserver.server.vectors import VectorServer
from shoal.paramserver.sparse import WrongGradient
from shoal.paramserver.waiting import ATTEMPT_SECONDS, NotPrimary

OnUpdate = Callable[["Server", Update, str | None], Awaitable[None]]


OnNotFinite = Callable[[PushId, str], None]


async def _stay(view: View) -> None:
    """For a server that never goes back."""


def _keep_to_itself(identity: PushId, reason: str) -> None:
    """For a server whose refusals nobody wants to hear of."""


class Server:
    """One server process.

    Args:
        node: on the wire, not listening yet.
        contact: to the center.
        make_shard: a shard as it is before the first update, or as the checkpoint has it.
        make_ledger: the update log likewise.
        rate: the learning rate of an update.
        on_round: called when an update is applied to every shard here; with the update log as it was then where a checkpoint is
        due.
        deadline_seconds: the longest wait for a peer.
        attempt_seconds: after which a request to a peer counts as lost and is sent again, beside what its payload takes.
        go_back: called with the view by which everyone goes back to the newest checkpoint; what is made then is what that says.
        make_copy: a shard to be filled with another server's copy; left out, ``make_shard``.
        on_not_finite: called when a gradient is refused because of NaN or infinity, with which one it was and what is said of it.
    """

    def __init__(
        self,
        node: Node,
        contact: Contact,
        *,
        make_shard: Callable[[int], ShardState],
        make_log: Callable[[], CommandLog],
        rate: Callable[[int], float],
        on_update: OnUpdate,
        deadline_seconds: float,
        attempt_seconds: float = ATTEMPT_SECONDS,
        go_back: Callable[[View], Awaitable[None]] = _stay,
        make_copy: Callable[[int], ShardState] | None = None,
        on_not_finite: OnNotFinite = _keep_to_itself,
    ) -> None:
        self.node = node
        self.contact = contact
        self._deadline = deadline_seconds
        self._attempt = attempt_seconds
        self._replication = Replication(
            node, contact, deadline_seconds=deadline_seconds, attempt_seconds=attempt_seconds
        )
        self._shard_store = ShardStore(
            contact,
            self._replication,
            identity=node.instance_id,
            make_shard=make_shard,
            make_copy=make_copy or make_shard,
            make_log=make_log,
            go_back=go_back,
            start=self._start,
            deadline_seconds=deadline_seconds,
        )

        async def tell(made: Update, cut: str | None) -> None:
            await on_update(self, made, cut)

        self._follower = LogFollower(
            contact, self._replication, self._shard_store, identity=node.instance_id, rate=rate, on_update=tell
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self.vectors = VectorServer(self._shard_store, contact, on_not_finite=self.take_not_finite)
        """Programs of a coordinator on the shards here, under lbfgs."""
        self._on_not_finite = on_not_finite
        self.num_not_finite = 0
        """Pushes that were refused because of NaN or infinity."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when this server cannot go on."""

    @property
    def identity(self) -> str:
        """This server's name in views."""
        return self.node.instance_id

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """The shards that are here, or on their way."""
        return self._shard_store.held.replicas

    @property
    def log_leader(self) -> LogLeader | None:
        """The update log, where this server keeps it."""
        return self._shard_store.held.log_leader

    @property
    def command_log(self) -> CommandLog | None:
        """A backup's copy of the update log."""
        return self._shard_store.held.command_log

    @property
    def version(self) -> int:
        """What every shard here has reached."""
        return self._shard_store.held.version

    @property
    def last_cut(self) -> str:
        """The update log as it was at the end; empty where this server did not come so far."""
        return self._follower.last_cut

    @property
    def leads(self) -> list[int]:
        """The shards that this server answers for, of those that are here."""
        return [
            shard
            for shard, replica in sorted(self.replicas.items())
            if replica.ready.is_set() and self.is_primary(shard)
        ]

    def is_primary(self, shard: int) -> bool:
        """Whether this server answers for a shard."""
        view = self.contact.view
        return view is not None and view.chains[shard].primary == self.identity

    async def follow(self) -> None:
        """Serve, and apply the updates of the update log as they come, until the last.

        Raises:
            RunError: a replica cannot go on.
        """
        self._start(self._shard_store.adopt_views())
        self._start(self._clean())
        await self._follower.follow()

    async def _clean(self) -> None:
        """Forget those who are in no view any more; until cancelled."""
        cleaner, seen = Cleaner(self.node), None
        while True:
            view = self.contact.view
            if view is not None and view is not seen:
                await cleaner.take_view(view)
                seen = view
            await self.contact.changed.wait(PARK_SECONDS)

    # -- requests ---------------------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> None:
        """Answer one request; refuse it when it is of another epoch or meant for another server."""
        body, epoch = request.body, request.header.epoch
        # Who only reads may be behind, by as much as all means the same weights: the views of one history.
        is_read = isinstance(body, Fetch | Follow | Pull)
        least = min(self._shard_store.held.since, self.node.epoch) if is_read else self.node.epoch
        if not least <= epoch <= self.node.epoch:
            await request.refuse("epoch", f"epoch {epoch} is not {self.node.epoch}, which it is here")
            return
        try:
            await self._serve(request, body)
        except NotPrimary as error:
            await request.refuse("primary", str(error))
        except LogTrimmed as error:
            await request.refuse("trimmed", str(error))

    async def _serve(self, request: Request, body: Any) -> None:
        epoch = request.header.epoch
        match body:
            case Push():
                await self._push(request, body)
            case Pull():
                await self._pull(request, body)
            case ReplicatePush():
                await self._forward(request, body)
            case ReplicateCommand():
                await self._note(request, body)
            case Fetch():
                await self._fetch(request, body)
            case Run() | Part() | ReplicateProgram() | Recall() | Advance() | Settle():
                await self.vectors.handle(request, body)
            case Follow():
                log_leader = self._shard_store.require_log_leader()
                told = self._follower.answer(log_leader, body.since, follower=request.sender, epoch=epoch)
                await request.answer(await told)
            case Remember():
                await self._remember(request, body)
            case Take():
                await self._take(request, body)
            case Commit():
                await self._commit(request, body.push)
            case _:
                await request.refuse("operation", f"a server does not know {type(body).__name__.lower()}")

    async def _push(self, request: Request, push: Push) -> None:
        replica = self._shard_store.require(push.shard)
        view = self.contact.view
        assert view is not None
        if not any(member.id == request.sender for member in view.workers):
            await request.refuse("stranger", f"worker {request.sender} is not in epoch {view.epoch}")
            return
        dtype = (
            "uint8" if push.rows or push.packed is not None else str(replica.state.weights.dtype).removeprefix("torch.")
        )
        if request.header.dtype != dtype:
            text = f"a gradient of shard {push.shard} is sent as {dtype}, not as {request.header.dtype or 'nothing'}"
            await request.refuse("shape", text)
            return
        if not await self._store(request, replica, request.sender, push):
            return
        forward = ReplicatePush(worker=request.sender, push=push)
        await self._shard_store.replicate(push.shard, forward, request.payload)
        await request.answer(Done())

    async def _forward(self, request: Request, forward: ReplicatePush) -> None:
        replica = self._shard_store.require_copy(request.sender, forward.push.shard)
        if await self._store(request, replica, forward.worker, forward.push, is_copy=True):
            await request.answer(Done())

    async def _store(
        self, request: Request, replica: Replica, worker: str, push: Push, *, is_copy: bool = False
    ) -> bool:
        """Keep a pushed gradient; when it cannot be kept, the request is refused."""
        try:
            payload = request.payload or memoryview(b"")
            replica.store(PushId(worker, push.number), payload, push.version, push.rows, push.packed)
        except NotFinite as error:
            self.take_not_finite(PushId(worker, push.number), str(error))
            await request.refuse("not-finite", str(error))
            return False
        except WorkerGone as error:
            if is_copy:
                return True  # Nobody will ever use it, so there is nothing to keep.
            await request.refuse("stranger", str(error))
            return False
        except (WrongGradient, ValueError) as error:
            await request.refuse("shape", str(error))
            return False
        return True

    def take_not_finite(self, identity: PushId, reason: str) -> None:
        """Count a gradient that is refused because of NaN or infinity, and let people know."""
        self.num_not_finite += 1
        self._on_not_finite(identity, reason)

    async def _pull(self, request: Request, pull: Pull) -> None:
        replica = self._shard_store.require(pull.shard)
        # Who asks waits longer than this: what is left after it is for the weights to cross.
        limit = Deadline(seconds=min(request.header.deadline, self._attempt, self._deadline))
        while replica.version < pull.need:
            if not await replica.changed.wait(min(limit.remaining, PARK_SECONDS)) and limit.is_over:
                await request.refuse("late", f"shard {pull.shard} is at version {replica.version}, not {pull.need}")
                return
            if self._shard_store.require(pull.shard) is not replica:
                raise NotPrimary(f"shard {pull.shard} went back to the checkpoint")
        with contextlib.ExitStack() as lent:
            async with replica.lock:
                version = replica.version
                weights = lent.enter_context(replica.read_snapshot()) if pull.have < version else None
            # Outside of the lock: whoever reads slowly, or stops, holds no update up and no other reader.
            await request.answer(Pulled(version=version, is_new=weights is not None), payload=weights)

    async def _remember(self, request: Request, asked: Remember) -> None:
        kept = self._shard_store.require(asked.shard).state.kept
        residual = None if kept is None else kept.hand_out(request.sender, asked.index)
        await request.answer(Remembered(has_residual=residual is not None), payload=residual)

    async def _fetch(self, request: Request, fetch: Fetch) -> None:
        replica = self._shard_store.require(fetch.shard)
        view = require_primary(self.contact.view, fetch.shard, self.identity)
        if request.sender not in view.chains[fetch.shard].replicas:
            # What is acknowledged from now on must wait for the new copy, and this server would not know to wait.
            raise NotPrimary(f"{request.sender} is no replica of shard {fetch.shard} in epoch {self.node.epoch}")
        update_log = self._shard_store.require_log_leader().snapshot() if fetch.shard == LOG_SHARD else b""
        text, tensors = await replica.export()
        if self._shard_store.require(fetch.shard) is not replica:
            raise NotPrimary(f"shard {fetch.shard} went back to the checkpoint")
        front = torch.frombuffer(bytearray(update_log + text), dtype=torch.uint8)
        payload = await asyncio.to_thread(torch.cat, (front, tensors))
        await request.answer(Fetched(update_log_bytes=len(update_log), text_bytes=len(text)), payload=payload)

    async def _take(self, request: Request, take: Take) -> None:
        found = await self._shard_store.require_log_leader().take(request.sender, take.held)
        match found:
            case WorkUnit():
                await request.answer(Taken(unit=found))
            case Wait():
                reason = found.reason + self._name_busy(found.on)
                await request.answer(Taken(unit=None, ask_again=True, must_commit=found.must_commit, reason=reason))
            case NotTaken():
                await request.refuse("stranger", found.reason)
            case _:
                await request.answer(Taken(unit=None))

    def _name_busy(self, workers: tuple[str, ...]) -> str:
        """Who is waited for, in people's words."""
        view = self.contact.view
        found = [view.find(worker) for worker in workers] if view is not None else []
        names = [member.name for member in found if member is not None]
        return f"; {', '.join(names)} {'is' if len(names) == 1 else 'are'} at it" if names else ""

    async def _commit(self, request: Request, push: PushRecord) -> None:
        log_leader = self._shard_store.require_log_leader()
        if push.worker != request.sender:
            await request.refuse("stranger", f"{request.sender} commits what {push.worker} is said to have done")
            return
        match await log_leader.commit(push):
            case Kept():
                await request.answer(Committed(is_kept=True, reason="", closed=log_leader.exposed))
            case NotTaken(reason=reason):
                # Not an answer: its work units stay in the worker's hands, and it must not go on as if they were done.
                await request.refuse("unfit", reason)
            case unused:
                reason = type(unused).__name__.lower()
                await request.answer(Committed(is_kept=False, reason=reason, closed=log_leader.exposed))

    async def _note(self, request: Request, note: ReplicateCommand) -> None:
        self._shard_store.require_copy(request.sender, LOG_SHARD)
        held = self._shard_store.held
        if held.command_log is None:
            # It is on its way; the copy may have been made before this input or after it.
            held.early.append(note)
        elif held.leader_id != request.sender:
            raise NotPrimary("the copy of the update log here is of another log leader, and is being made anew")
        elif note.place == held.command_log.place + 1:
            held.command_log.enter(Command.decode(note.text))
        elif note.place > held.command_log.place + 1:
            raise RunError(
                f"input {note.place} of the update log came, and {held.command_log.place} are here: one was lost"
            )
        await request.answer(Done())

    # -- life -------------------------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self.failure.done():
            return
        error = task.exception()
        if error is not None and not isinstance(error, NotPrimary):
            self.failure.set_exception(error)

    async def close(self) -> None:
        """Stop everything that runs beside."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.failure.done():
            self.failure.cancel()
        elif not self.failure.cancelled():
            self.failure.exception()  # Whoever waited for it has it.
