"""The center: membership, the shard map, epochs, and the vote on checkpoints. It holds no weight and hands out no work.

What it decides is in ``elastic/membership.py``; this file brings events there and makes what comes out true: a view is published
only under an epoch that the elector has granted, and nothing is answered when the lease is over. A center that was paused and
wakes up finds its lease gone, and whatever it still manages to send carries an epoch that everyone refuses.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from shoal.comm.wire.listener import Request
from shoal.comm.wire.node import Node
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.elastic.changes import (
    Ask,
    Collect,
    Elected,
    Event,
    GiveUp,
    Heard,
    Joined,
    Left,
    Publish,
    Refuse,
    Release,
    Remind,
    Restore,
    Stall,
    Sync,
    Ticked,
    describe_change,
)
from shoal.elastic.changes import Failed as ReplicaFailed
from shoal.elastic.changes import Synced as ReplicaSynced
from shoal.elastic.election.elector import Deposed, Elector
from shoal.elastic.membership import State, Wanted, step
from shoal.elastic.view import Member, View
from shoal.paramserver.center.ballots import Ballots as BallotBox
from shoal.paramserver.cleaner import Cleaner
from shoal.paramserver.contact import WATCH_SECONDS
from shoal.paramserver.messages import (
    FINISHED,
    Ballot,
    Dead,
    Done,
    Draw,
    Failed,
    Halt,
    Join,
    Leave,
    Synced,
    Told,
    Watch,
    Watched,
)
from shoal.paramserver.messages import (
    Ask as AskCenter,
)
from shoal.paramserver.messages import Joined as Welcome
from shoal.paramserver.waiting import ChangeEvent

_TICK_SECONDS = 0.2


class Driver(Protocol):
    """What a leading center drives beside membership."""

    async def run(self) -> None:
        """Drive while the center leads, until cancelled."""
        ...

    async def draw(self, request: Request, body: Draw) -> None:
        """Answer a free worker."""
        ...


class Center:
    """One candidate for the center.

    Args:
        node: on the wire; it listens already, with ``handle``.
        elector: its part in the election.
        wanted: what the run asked for.
        tell: takes a line for people.
        settings: what the recipe says of everything that all must agree on; None to compare models only.
        folder: sockets and arenas of the run on this machine, to be cleaned of what the departed left.
        on_view: told of every view that is published, and why it is.
    """

    def __init__(
        self,
        node: Node,
        elector: Elector,
        *,
        wanted: Wanted,
        tell: Callable[[str], None],
        settings: Mapping[str, str] | None = None,
        folder: Path | None = None,
        on_view: Callable[[View, str], None] = lambda view, cause: None,
    ) -> None:
        self._node = node
        self._on_view = on_view
        self._elector = elector
        self._wanted = wanted
        self._tell = tell
        self._settings = settings
        self._state = State(wanted=wanted)
        self._is_leading = False
        self._lock = asyncio.Lock()
        self._changed = ChangeEvent()
        self._refused: dict[str, Refuse] = {}
        self._asked: set[str] = set()
        self._stalled: dict[str, str] = {}
        """Who is to ask again, and why, until it is told."""
        self._model: Tensors | None = None
        self._data: Mapping[str, str] = {}
        self._run = ""
        """The run that this is, from the first server that was let in; it outlives an election."""
        self._versions: dict[str, int] = {}
        self._ballots = BallotBox()
        self._cleaner = Cleaner(node, folder=folder)
        self._halt = ""
        self._stopped = ""
        """Why somebody stopped the run; empty when nobody did."""
        self._gave_up: str | None = None
        self.driver: Driver | None = None
        """Who drives the steps, where the update rule wants them driven."""

    @property
    def view(self) -> View | None:
        """The view that this center stands for now; None when it does not lead."""
        is_public = self._is_leading and self._elector.is_valid() and self._state.phase == "running"
        return self._state.view if is_public else None

    async def run(self) -> str:
        """Stand for election, lead when elected, and again, until the run has ended and every member has left.

        Returns:
            Why the run was stopped; empty when it was finished.

        Raises:
            RequestError: the run cannot begin: too few came.
        """
        while True:
            epoch = await self._elector.campaign()
            self._state, self._model = State(wanted=self._wanted), None
            self._refused, self._asked, self._versions = {}, set(), {}
            self._node.epoch = epoch
            self._tell(f"center of epoch {epoch}")
            driving: asyncio.Future[None] | None = None
            try:
                await self._take(Elected(epoch=epoch, now=time.monotonic()))
                self._is_leading = True
                driving = asyncio.ensure_future(self.driver.run()) if self.driver is not None else None
                await self._lead(driving)
                return self._stopped
            except Deposed as error:
                self._tell(str(error))
            finally:
                self._is_leading = False
                self._changed.notify()
                if driving is not None:
                    driving.cancel()
                    await asyncio.gather(driving, return_exceptions=True)

    async def _lead(self, driving: "asyncio.Future[None] | None") -> None:
        renewed = time.monotonic()
        while self._state.members or not self._halt:
            await asyncio.sleep(_TICK_SECONDS)
            if time.monotonic() - renewed >= _TICK_SECONDS:
                async with self._lock:
                    await self._elector.renew()
                renewed = time.monotonic()
            await self._take(Ticked(now=time.monotonic()))
            if driving is not None and driving.done():
                driving.result()
            if self._gave_up is not None:
                raise RequestError(self._gave_up)

    async def _take(self, event: Event) -> None:
        """Give an event to the state machine and do what it says."""
        async with self._lock:
            state, instructions = step(self._state, event)
            for instruction in instructions:
                match instruction:
                    case Publish(view=view):
                        granted = await self._elector.advance()
                        assert granted == view.epoch, (granted, view.epoch)
                        self._node.epoch = granted
                        self._ballots.take_view(view)
                        self._versions = {member.id: self._versions.get(member.id, -1) for member in view}
                        await self._cleaner.take_view(view)
                        self._tell(
                            f"epoch {granted}: {len(view.servers)} servers, {len(view.workers)} workers, primaries "
                            + ", ".join(_name(view.find(chain.primary)) for chain in view.chains)
                        )
                        self._on_view(view, describe_change(self._state.view, view, event))
                    case Refuse(id=member):
                        self._refused[member] = instruction
                        if instruction.code == "taken":
                            self._tell(instruction.reason)
                    case Stall(id=member, reason=reason):
                        self._stalled[member] = reason
                    case Ask(id=member):
                        self._asked.add(member)
                    case GiveUp(reason=reason):
                        self._gave_up = reason
                    case Sync() | Release() | Restore() | Remind():
                        pass  # Members read these off the view: what to fetch, whom to forget, what to go back to.
                    case Collect():
                        pass  # Done with the view that it came with: here by the cleaner, a replica by the server that has it.
            is_news = bool(instructions) or state.view is not self._state.view or state.phase != self._state.phase
            self._state = state
        if is_news:
            # Not for every sign of life: whoever is woken gives one, which would wake all the others.
            self._changed.notify()

    # -- requests ---------------------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> None:
        """Answer a member, or say that somebody else leads."""
        if not self._may_speak():
            await request.refuse("not-leading", "this candidate does not lead; look for the center again")
            return
        try:
            await self._serve(request)
        except Deposed as error:
            await request.refuse("not-leading", str(error))

    async def _serve(self, request: Request) -> None:
        body, sender, now = request.body, request.sender, time.monotonic()
        match body:
            case Join():
                await self._join(request, body)
            case Watch():
                await self._watch(request, body)
            case Leave():
                await self._take(Left(id=sender, reason=body.reason, now=now))
                await request.answer(Done())
            case Dead():
                await self._take(Left(id=body.member, reason=body.reason, now=now))
                await request.answer(Done())
            case Synced():
                await self._take(ReplicaSynced(shard=body.shard, server=sender, order=body.order))
                await request.answer(Done())
            case Failed():
                self._tell(f"server {body.server} does not follow shard {body.shard}: {body.reason}")
                event = ReplicaFailed(
                    shard=body.shard,
                    server=body.server,
                    reporter=sender,
                    epoch=body.epoch,
                    reason=body.reason,
                    now=now,
                )
                await self._take(event)
                await request.answer(Done())
            case Ballot():
                await self._ballots.cast(request, body)
            case Halt():
                if not self._halt or body.reason == FINISHED:
                    self._halt = body.reason
                if body.reason != FINISHED:
                    self._stopped = self._stopped or body.reason
                self._changed.notify()
                await request.answer(Done())
            case Draw():
                if self.driver is None:
                    await request.refuse("operation", "this run has no batch that is handed out")
                else:
                    await self.driver.draw(request, body)
            case AskCenter():
                await request.answer(Told(view=self._state.view, versions=tuple(sorted(self._versions.items()))))
            case _:
                await request.refuse("operation", f"a center does not know {type(body).__name__.lower()}")

    async def _join(self, request: Request, join: Join) -> None:
        trouble = self._find_trouble(join)
        if trouble is not None:
            self._tell(f"{join.name} is not let in: {trouble}")
            await request.refuse("unwelcome", f"{join.name} is not let in: {trouble}")
            return
        if self._model is None:
            await request.refuse("wait", "no server has joined yet")
            return
        member = Member(
            id=request.sender,
            name=join.name,
            role=join.role,
            address=join.address,
            started=join.started,
            origin=join.origin,
        )
        self._asked.discard(member.id)
        await self._take(Joined(member=member, now=time.monotonic(), view=join.view))
        stalled = self._stalled.pop(member.id, None)
        if await self._refuse_departed(request):
            return
        if stalled is not None:
            await request.refuse("wait", stalled)
        else:
            await request.answer(Welcome(run=self._run))

    def _find_trouble(self, join: Join) -> str | None:
        """Why somebody is not let in; None when nothing is wrong. The first server of which nothing is brings the run's model."""
        if (trouble := find_other_run(self._run, join, epoch=self._node.epoch)) is not None:
            return trouble
        difference = None if self._model is None else find_difference(self._model, join.model)
        if difference is not None:
            return f"its model is another one: {difference}"
        if self._settings is not None:
            difference = find_setting_difference(self._settings, join.settings, here="the center", there=join.name)
        if difference is not None:
            return f"its recipe is another one: {difference}"
        difference = find_data_difference(self._data, join.data, there=join.name) if self._model is not None else None
        if difference is not None:
            return f"its data is other data: {difference}; give every process the same files, in the same order"
        if self._model is None and join.role == "server":
            self._model, self._data = join.model, join.data
            self._run = self._run or join.run
        return None

    async def _watch(self, request: Request, watch: Watch) -> None:
        sender = request.sender
        await self._take(Heard(id=sender, now=time.monotonic(), epoch=watch.epoch))
        if await self._refuse_departed(request):
            return
        if sender in self._asked:
            self._asked.discard(sender)
            await request.refuse("introduce", "this center does not know you yet: join")
            return
        self._versions[sender] = watch.version
        limit = Deadline(seconds=WATCH_SECONDS)
        while not self._has_news(watch) and self._may_speak() and sender not in self._refused and not limit.is_over:
            await self._changed.wait(limit.remaining)
        if not self._may_speak():
            await request.refuse("not-leading", "this candidate does not lead any more")
        elif not await self._refuse_departed(request):
            is_public = self._state.phase == "running"
            view = self._state.view if is_public else None
            await request.answer(Watched(view=view, halt=self._halt, stopped=self._stopped))

    def _has_news(self, watch: Watch) -> bool:
        view = self._state.view if self._state.phase == "running" else None
        return self._halt != watch.halt or (view is not None and view.epoch > watch.epoch)

    def _may_speak(self) -> bool:
        return self._is_leading and self._elector.is_valid()

    async def _refuse_departed(self, request: Request) -> bool:
        refusal = self._refused.get(request.sender)
        if refusal is None:
            return False
        await request.refuse("evicted" if refusal.code == "departed" else "unwelcome", refusal.reason)
        return True


def _name(member: Member | None) -> str:
    return member.name if member is not None else "?"


def find_other_run(ours: str, join: Join, *, epoch: int) -> str | None:
    """Why a member is not of this center's run, both sides named; None when it is, or has been in none yet.

    A run's epochs only grow, from center to center. So a center that knows of no run yet cannot be of one whose members have
    already seen its epoch: it leads another run, at an address that theirs had.
    """
    if ours and join.run and join.run != ours:
        return f"it belongs to the run {join.run} and this center to the run {ours}; start it with this run's --centers"
    if not ours and join.run and join.view is not None and join.view.epoch >= epoch:
        return (
            f"it belongs to the run {join.run}, which has reached epoch {join.view.epoch}, and this center begins with epoch "
            f"{epoch}: it is another run's; start it with this run's --centers, or the center with the --run-dir that it had"
        )
    return None


# Who is let in: a member's model is compared with the servers' by name, shape and type, before it can touch a weight; what its
# recipe says with the center's, because two that differ in a seed or a rate have the same shapes; and its data with the
# servers', because work units are named by numbers, which mean other samples in other data.

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type of every trained parameter, by name."""


def find_difference(servers: Tensors, member: Tensors) -> str | None:
    """The first way in which a member's model is not the servers', both sides named; None when it is the same."""
    for name in sorted(servers.keys() ^ member.keys()):
        side, other = ("the servers", "this member") if name in servers else ("this member", "the servers")
        return f"{name!r} is trained by {side} and not by {other} ({len(servers)} and {len(member)} parameters)"
    for name, (shape, dtype) in sorted(servers.items()):
        theirs, their_dtype = member[name]
        if tuple(shape) != tuple(theirs) or dtype != their_dtype:
            return f"{name!r} is {list(shape)} {dtype} at the servers and {list(theirs)} {their_dtype} at this member"
    return None


def find_setting_difference(ours: Mapping[str, str], theirs: Mapping[str, str], *, here: str, there: str) -> str | None:
    """The settings in which two recipes differ, both sides named; None when there is none."""
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not keys:
        return None
    shown = [
        f"{key} is {ours.get(key, 'not set')} at {here} and {theirs.get(key, 'not set')} at {there}" for key in keys[:3]
    ]
    return "; ".join(shown) + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


def find_data_difference(servers: Mapping[str, str], member: Mapping[str, str], *, there: str) -> str | None:
    """In what a member's data is not the servers', both sides named; None when it is the same as far as both can say."""
    for key, value in servers.items():
        if member.get(key, value) != value:
            return f"{key} is {value} at the servers and {member[key]} at {there}"
    return None
