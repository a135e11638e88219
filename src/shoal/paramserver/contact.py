"""A member's line to whoever is the center now: it introduces itself, gives signs of life, and learns of every new view.

While there is no center the last view holds, and its holder works on. A view with an epoch that is not higher than the known
one is old news from a center that was paused, and is dropped.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from shoal.comm.wire.buffers import Payload
from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.node import Node
from shoal.comm.wire.peer import Peer
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.elastic.election.elector import Center
from shoal.elastic.view import View
from shoal.paramserver.messages import FINISHED, Join, Joined, Leave, Message, Watch, Watched
from shoal.paramserver.waiting import ChangeEvent, Moved

WATCH_SECONDS = 0.5
"""How long a center parks a watch: members are heard of twice a second."""
_LOOK_SECONDS = 0.05
"""How often a member without a center looks for one."""
_GLANCE_SECONDS = 0.2
"""How often it looks whether its center, which does not answer, still leads; the death of one is seen at once."""
_ANSWER_SECONDS = 3.0
_OLD_PROTOCOL = 3
"""Refusals in a row because of the protocol's version after which it is not a damaged message, but an old release."""

Find = Callable[[], Center | None]
"""Who leads now, as far as is known; must not wait."""
T = TypeVar("T")


class Evicted(Exception):
    """The center took this member for dead: what it was doing was given to others."""


class Contact:
    """See the module.

    Args:
        node: this process on the wire; its epoch is kept at the view's.
        find: where the center is.
        introduce: what this member says to a center.
        ends_with_history: whether this member is out when everyone goes back to the checkpoint. A worker is: what it does then
            belongs to updates that never were, and it begins again under a new name.
    """

    def __init__(
        self, node: Node, *, find: Find, introduce: Callable[[View | None], Join], ends_with_history: bool = False
    ) -> None:
        self._node = node
        self._find = find
        self._introduce = introduce
        self._ends_with_history = ends_with_history
        self.view: View | None = None
        self.stopped = ""
        """Why somebody stopped the run; empty when nobody did."""
        self.halt = ""
        """Why the run is to stop; empty while it is not."""
        self.version = -1
        """Told to the center with every sign of life."""
        self.run_id = ""
        """The run that this member has been let into; empty before."""
        self.changed = ChangeEvent()
        self._peer: Peer | None = None
        self._was_member = False
        self._num_old = 0
        self._task: asyncio.Task[None] | None = None
        self._asked: dict[asyncio.Timeout, Callable[[View], bool]] = {}

    def start(self) -> None:
        """Begin to keep in touch."""
        self._task = asyncio.get_running_loop().create_task(self.run())

    def check(self) -> None:
        """Raise what ended the contact, if it has ended."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Lose touch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def run(self) -> None:
        """Keep in touch until cancelled.

        Raises:
            RequestError: the center does not let this member in, and says why.
            Evicted: the center went on without this member.
        """
        try:
            while True:
                center = self._find()
                if center is None:
                    await asyncio.sleep(_LOOK_SECONDS)
                else:
                    await self._visit(center)
        finally:
            # Nobody will tell of a new view any more, so nobody is to wait for one.
            self._interrupt(lambda needed: True)
            self.changed.notify()

    async def _visit(self, center: Center) -> None:
        peer = self._node.connect(center.address)
        self._peer = peer
        try:
            # It may have died a moment ago, and then there is nobody to connect to: a successor is to be seen at once here too.
            join = self._introduce(self.view)
            join = msgspec.structs.replace(join, run=self.run_id or join.run)
            welcome = await self._call(peer, center, join, glance=_LOOK_SECONDS)
            if welcome is not None:
                self._num_old = 0
                self.run_id = welcome.run if isinstance(welcome, Joined) and welcome.run else self.run_id
                await self._watch(peer, center)
        except WireTimeout:
            pass  # It is dead, or somebody else leads by now: look again.
        except Refused as refused:
            self._num_old = self._num_old + 1 if refused.code == "version" else 0
            # Oversized: the names of a model's parameters are more than a message holds, and will be next time.
            if refused.code in ("unwelcome", "oversized") or self._num_old == _OLD_PROTOCOL:
                raise RequestError(refused.text) from refused
            if refused.code == "evicted":
                raise Evicted(refused.text) from refused
            await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._peer = None
            await peer.close()

    async def tell(self, message: Message, *, deadline: float) -> Message:
        """Ask the center something, whoever it is by then; see ``ask``."""
        return (await self.ask(message, deadline=deadline))[0]

    async def ask(self, message: Message, *, deadline: float, payload: Payload | None = None) -> tuple[Message, bytes]:
        """Ask the center something, whoever it is by then; its answer and what came with it.

        Raises:
            TimeoutError: no center answered in time, or none will because the contact has ended; says what was asked.
        """
        limit = Deadline(seconds=deadline)
        while True:
            peer, has_ended = self._peer, self._task is not None and self._task.done()
            if peer is not None and not limit.is_over:
                try:
                    seconds = limit.remaining if payload is not None else min(limit.remaining, _ANSWER_SECONDS)
                    answer = await peer.call(message, payload=payload, deadline=max(seconds, 0.001))
                    assert isinstance(answer.body, Message)
                    return answer.body, b"" if answer.payload is None else bytes(answer.payload)
                except (WireTimeout, Refused):
                    pass
            await asyncio.sleep(_LOOK_SECONDS)
            if has_ended:
                # One that is out and has a vote under way must not take the whole deadline to end.
                raise TimeoutError(f"no center will answer {type(message).__name__.lower()}: this one is out of touch")
            if limit.is_over:
                raise TimeoutError(f"no center answered {type(message).__name__.lower()} within {deadline:g} s")

    async def while_needed(self, call: Coroutine[Any, Any, T], is_needed: Callable[[View], bool]) -> T:
        """Wait for the answer of another member, but only for as long as every new view says that it is the one to ask.

        Raises:
            Moved: it is not any more, or this member is out itself. The call was given up, and may have been carried out.
        """
        if self.view is not None and not is_needed(self.view):
            call.close()
            raise Moved
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._asked[timeout] = is_needed
                return await call
        except TimeoutError as error:
            if timeout.expired():
                raise Moved from error
            raise
        finally:
            self._asked.pop(timeout, None)

    async def leave(self, reason: str) -> None:
        """Say goodbye, if anyone listens."""
        if self._task is None or self._task.done():
            return
        try:
            await self.tell(Leave(reason=reason), deadline=1.0)
        except TimeoutError:
            return

    async def newer_than(self, epoch: int, seconds: float) -> bool:
        """Wait for a view with a higher epoch, at most so long; True when there is one."""
        limit = Deadline(seconds=seconds)
        while self.view is None or self.view.epoch <= epoch:
            if limit.is_over or not await self.changed.wait(limit.remaining):
                return self.view is not None and self.view.epoch > epoch
        return True

    async def _watch(self, peer: Peer, center: Center) -> None:
        while True:
            known = self.view.epoch if self.view is not None else 0
            watch = Watch(epoch=known, version=self.version, halt=self.halt)
            heard = await self._call(peer, center, watch, glance=_GLANCE_SECONDS)
            if heard is None:
                return
            assert isinstance(heard, Watched)
            self._take_in(heard)

    async def _call(self, peer: Peer, center: Center, message: Message, *, glance: float) -> Message | None:
        """A center's answer; None when somebody else leads before there is one, which is looked for every so often."""
        call = asyncio.ensure_future(peer.call(message, deadline=_ANSWER_SECONDS))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=glance)
                current = self._find() if not call.done() else None
                if current is not None and current.address != center.address:
                    return None
        finally:
            call.cancel()
        answer = call.result().body
        assert isinstance(answer, Message)
        return answer

    def _take_in(self, heard: Watched) -> None:
        self.stopped = self.stopped or heard.stopped
        if heard.halt and self.halt != FINISHED and heard.halt != self.halt:
            self.halt = heard.halt
            self.changed.notify()
        before, view = self.view, heard.view
        if view is None or (before is not None and view.epoch <= before.epoch):
            return
        self.view = view
        self._node.epoch, self._node.members = view.epoch, frozenset(member.id for member in view)
        is_member = view.find(self._node.instance_id) is not None
        self._interrupt(lambda is_needed: not is_needed(view))
        self.changed.notify()
        if self._was_member and not is_member:
            raise Evicted(f"epoch {view.epoch} went on without this member")
        if self._ends_with_history and before is not None and view.history != before.history and self._was_member:
            raise Evicted(f"in epoch {view.epoch} everyone went back to the checkpoint")
        self._was_member = self._was_member or is_member

    def _interrupt(self, should_end: Callable[[Callable[[View], bool]], bool]) -> None:
        now = asyncio.get_running_loop().time()
        for timeout, is_needed in self._asked.items():
            if not timeout.expired() and should_end(is_needed):
                timeout.reschedule(now)
