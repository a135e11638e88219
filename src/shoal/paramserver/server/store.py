"""What a server holds, and how each new view changes it: shards taken up and put down, the update log kept or followed.

Everything of one history is in one ``HistoryState``. When everyone goes back to the checkpoint a new one takes its place, and
whatever was under way for the old one sees that it is not current any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import RunError
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.contact import Contact
from shoal.paramserver.log.commands import Command, CommandLog
from shoal.paramserver.log.leader import PARK_SECONDS, LogLeader
from shoal.paramserver.messages import Fetch, Fetched, Message, ReplicateCommand, Synced
from shoal.paramserver.server.replica import Replica, unpack
from shoal.paramserver.server.replication import Replication, require_primary
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.waiting import NotPrimary, seconds_for

LOG_SHARD = 0
"""The shard whose primary leads the log."""
_STATE_ROWS = 8
"""How much a shard's whole state is, in rows of its weights: those, the optimizer's, and gradients that wait."""


@dataclass(eq=False, kw_only=True)
class HistoryState:
    """Everything that a server holds of one history."""

    history: int = 0
    since: int = 0
    """The epoch of the first view of this history that came here; who asks under a lower one means an earlier history."""
    replicas: dict[int, Replica] = field(default_factory=dict)
    command_log: CommandLog | None = None
    """A backup's update log; the primary's is the log leader's."""
    log_leader: LogLeader | None = None
    leader_id: str = ""
    """Whose update log ``command_log`` is a copy of."""
    early: list[ReplicateCommand] = field(default_factory=list)
    """Inputs of the update log that came before the update log itself."""
    is_copying: bool = False
    """True while the update log of a new log leader is fetched."""
    began: int | None = None
    """The version that the shards made here began with; None where all were fetched from others."""
    told: int = -1
    """Updates that were reported as applied."""

    @property
    def version(self) -> int:
        """What every shard here has reached; -1 without any."""
        return min((replica.version for replica in self.replicas.values() if replica.ready.is_set()), default=-1)

    def drop(self, shard: int) -> None:
        """Put a shard down."""
        self.replicas.pop(shard, None)
        if shard == LOG_SHARD:
            self.close_update_log()

    def close_update_log(self) -> None:
        """Put the update log down."""
        if self.log_leader is not None:
            self.log_leader.close()
        self.log_leader = self.command_log = None
        self.leader_id, self.early = "", []


class ShardStore:
    """See the module.

    Args:
        contact: to the center.
        replication: to other servers.
        identity: this server's name in views.
        make_shard: a shard as it is before the first update, or as the checkpoint has it.
        make_copy: a shard to be filled with another server's copy.
        make_ledger: the update log likewise.
        go_back: called when a history begins that is not the first, before anything is made for it.
        start: runs something beside.
        deadline_seconds: the longest wait for a copy of a shard.
    """

    def __init__(
        self,
        contact: Contact,
        replication: Replication,
        *,
        identity: str,
        make_shard: Callable[[int], ShardState],
        make_copy: Callable[[int], ShardState],
        make_log: Callable[[], CommandLog],
        go_back: Callable[[View], Awaitable[None]],
        start: Callable[[Coroutine[Any, Any, None]], None],
        deadline_seconds: float,
    ) -> None:
        self._contact = contact
        self._replication = replication
        self._identity = identity
        self._make_shard, self._make_copy, self._make_command_log = make_shard, make_copy, make_log
        self._go_back = go_back
        self._start = start
        self._deadline = deadline_seconds
        self.held = HistoryState()

    def require(self, shard: int) -> Replica:
        """The shard, if this server answers for it and has it.

        Raises:
            NotPrimary: it does not.
        """
        view = require_primary(self._contact.view, shard, self._identity)
        replica = self.held.replicas.get(shard)
        if view.history != self.held.history or replica is None or not replica.ready.is_set():
            raise NotPrimary(f"shard {shard} is not here yet")
        return replica

    def require_copy(self, sender: str, shard: int) -> Replica:
        """The copy of a shard here, if it is its primary that sends.

        Raises:
            NotPrimary: it is not, or this server has no copy of the shard in the present view.
        """
        view, held = self._contact.view, self.held
        if view is None or not 0 <= shard < len(view.chains) or view.chains[shard].primary != sender:
            raise NotPrimary(f"{sender} does not answer for shard {shard} in epoch {0 if view is None else view.epoch}")
        replica = held.replicas.get(shard)
        if replica is None or view.history != held.history or (held.log_leader is not None and shard == LOG_SHARD):
            raise NotPrimary(f"this server has no copy of shard {shard} yet")
        return replica

    async def replicate(self, shard: int, message: Message, payload: memoryview | None = None) -> None:
        """Bring something of this history to every other replica of a shard; see ``Replication.replicate``."""
        held = self.held
        await self._replication.replicate(shard, message, is_current=lambda: self.held is held, payload=payload)

    def require_log_leader(self) -> LogLeader:
        """The update log, if this server keeps it.

        Raises:
            NotPrimary: it does not.
        """
        self.require(LOG_SHARD)
        if self.held.log_leader is None:
            raise NotPrimary("this server does not lead the log")
        return self.held.log_leader

    async def adopt_views(self) -> None:
        """Take up the shards that each new view gives this server, and put down those it takes away; until cancelled.

        Beside the contact and not inside it: making a shard takes long, and signs of life must go on.
        """
        adopted: View | None = None
        while True:
            view = self._contact.view
            if view is None or view is adopted:
                await self._contact.changed.wait(PARK_SECONDS)
                continue
            await self._adopt(view)
            adopted = view

    async def _adopt(self, view: View) -> None:
        if view.history != self.held.history:
            # Everyone goes back to the checkpoint: what is here was made of updates that never were.
            self.held.close_update_log()
            self.held = HistoryState(history=view.history, since=view.epoch)
            await self._go_back(view)
        for shard, chain in enumerate(view.chains):
            await self._adopt_chain(shard, chain)
        self._adopt_update_log(view.chains[LOG_SHARD])
        for replica in self.held.replicas.values():
            replica.changed.notify()

    async def _adopt_chain(self, shard: int, chain: Chain) -> None:
        held = self.held
        replica = held.replicas.get(shard)
        order = next((one.order for one in chain.joining if one.server == self._identity), None)
        if order is not None:
            if replica is None or replica.order != order:
                # Also where there is one: under another order something may have passed it by.
                held.drop(shard)
                held.replicas[shard] = Replica(None, order=order)
                self._start(self._sync(held, shard, held.replicas[shard]))
        elif self._identity not in chain.synced:
            held.drop(shard)
        elif replica is None:
            # Only the first views of a history give a shard without a copy of it: everyone can make the same.
            state = await asyncio.to_thread(self._make_shard, shard)
            held.replicas[shard] = Replica(state)
            held.began = state.version
            if shard == LOG_SHARD:
                held.command_log, held.leader_id = self._make_command_log(), chain.primary
        elif not replica.ready.is_set():
            raise RunError(f"shard {shard} is said to be here, and its copy is still on its way")

    def _adopt_update_log(self, chain: Chain) -> None:
        held = self.held
        if self._identity == chain.primary and held.log_leader is None:
            assert held.command_log is not None, "a primary of shard 0 has its update log"
            held.log_leader, held.command_log = LogLeader(held.command_log, replicate=self._replicate_of(held)), None
            held.leader_id = self._identity
            self._start(self._keep(held.log_leader))
        elif held.command_log is not None and held.leader_id != chain.primary and not held.is_copying:
            # The one before may have told this server something that the new log leader never heard, or the other way round.
            held.is_copying = True
            self._start(self._copy_update_log(held))

    def _replicate_of(self, held: HistoryState) -> Callable[[int, Command], Awaitable[None]]:
        async def replicate(place: int, given: Command) -> None:
            note = ReplicateCommand(place=place, text=given.encode())
            await self._replication.replicate(LOG_SHARD, note, is_current=lambda: self.held is held)

        return replicate

    async def _keep(self, log_leader: LogLeader) -> None:
        await log_leader.begin()
        self._start(self._meet_workers(log_leader))
        self._start(self._trim(log_leader))
        await log_leader.keep_time()

    async def _trim(self, log_leader: LogLeader) -> None:
        while not log_leader.is_closed:
            await asyncio.sleep(PARK_SECONDS)
            view = self._contact.view
            # A shard that is being copied will ask for every update since the copy was made.
            if view is not None and not any(chain.joining for chain in view.chains):
                servers = {server for chain in view.chains for server in chain.replicas}
                await log_leader.trim(servers, epoch=view.epoch)

    async def _meet_workers(self, log_leader: LogLeader) -> None:
        """Tell the update log who comes and who goes, and when to stop."""
        while not log_leader.is_closed:
            view = self._contact.view
            assert view is not None
            update_log = log_leader.command_log.update_log
            present = {member.id: member for member in view.workers}
            went = sorted(update_log.members.keys() - present.keys())
            came = sorted(present.keys() - update_log.members.keys() - set(update_log.gone))
            if self._contact.halt:
                log_leader.halt()
            if went:
                await log_leader.leave(went[0])
            elif came:
                await log_leader.join(came[0], index_of(present[came[0]]))
            else:
                await self._contact.changed.wait(PARK_SECONDS)

    # -- copies from others -----------------------------------------------------------------------------------------------------

    async def _sync(self, held: HistoryState, shard: int, replica: Replica) -> None:
        """Fetch a shard from its primary and tell the center when it is here."""
        state = await asyncio.to_thread(self._make_copy, shard)
        while not replica.ready.is_set():
            if self.held is not held or held.replicas.get(shard) is not replica:
                return
            found = await self._fetch(shard, state.weights.nbytes)
            if found is None:
                continue
            if self.held is not held or held.replicas.get(shard) is not replica:
                return
            sender, update_log, tensors, values = found
            await asyncio.to_thread(state.restore, tensors, values)
            if self.held is not held or held.replicas.get(shard) is not replica:
                return
            if shard == LOG_SHARD:
                self._open_copy(held, sender, update_log)
            replica.fill(state)
        while self._order_of(shard) == replica.order:
            view = self._contact.view
            assert view is not None
            try:
                await self._contact.tell(Synced(shard=shard, order=replica.order), deadline=self._deadline)
            except TimeoutError:
                continue  # There is no center; the shard is as good without it, and is told to the next one.
            await self._contact.newer_than(view.epoch, PARK_SECONDS)

    async def _copy_update_log(self, held: HistoryState) -> None:
        """Take the new log leader's update log in place of the old one's; until then none of its inputs is taken here."""
        try:
            while self.held is held and held.command_log is not None:
                view = self._contact.view
                assert view is not None
                chain = view.chains[LOG_SHARD]
                if held.leader_id == chain.primary or self._identity not in chain.synced[1:]:
                    return
                found = await self._fetch(LOG_SHARD, held.replicas[LOG_SHARD].state.weights.nbytes)
                if found is not None and self.held is held and held.command_log is not None:
                    self._open_copy(held, found[0], found[1])
        finally:
            held.is_copying = False

    def _open_copy(self, held: HistoryState, leader_id: str, update_log: bytes) -> None:
        command_log = CommandLog.restore(update_log)
        for note in sorted(held.early, key=lambda early: early.place):
            if note.place == command_log.place + 1:
                command_log.enter(Command.decode(note.text))
        held.command_log, held.leader_id, held.early = command_log, leader_id, []

    async def _fetch(self, shard: int, row_bytes: int) -> tuple[str, bytes, dict[str, Any], dict[str, Any]] | None:
        view = self._contact.view
        assert view is not None
        primary = view.chains[shard].primary
        if primary == self._identity:
            await self._contact.newer_than(view.epoch, PARK_SECONDS)
            return None
        seconds = seconds_for(_STATE_ROWS * row_bytes, base=self._deadline)
        answer = await self._replication.ask(primary, Fetch(shard=shard), shard=shard, seconds=seconds)
        if answer is None:
            return None
        found = answer.body
        assert isinstance(found, Fetched) and answer.payload is not None
        update_log_end, text_end = found.update_log_bytes, found.update_log_bytes + found.text_bytes
        # In a thread, as at the other end: signs of life go on while a large shard is copied.
        text, rows = bytes(answer.payload[update_log_end:text_end]), answer.payload[text_end:]
        tensors, values = await asyncio.to_thread(unpack, text, rows)
        return primary, bytes(answer.payload[:update_log_end]), tensors, values

    def _order_of(self, shard: int) -> int | None:
        """The order under which this server is to become a backup of a shard; None when it is one, or is not to be."""
        view = self._contact.view
        assert view is not None
        return next((one.order for one in view.chains[shard].joining if one.server == self._identity), None)


def index_of(worker: Member) -> int:
    """Which share a worker prefers: the number at the end of its name."""
    tail = worker.name.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() else 0
