"""A server follows the log: it asks the log leader for updates and applies them, in order, to every shard it holds."""

from collections.abc import Awaitable, Callable

from shoal.core.errors import RunError
from shoal.paramserver.contact import Contact
from shoal.paramserver.log.leader import PARK_SECONDS, LogLeader
from shoal.paramserver.messages import FINISHED, Follow, Followed
from shoal.paramserver.records import Update
from shoal.paramserver.server.replication import Replication
from shoal.paramserver.server.store import LOG_SHARD, HistoryState, ShardStore
from shoal.paramserver.waiting import NotPrimary

OnUpdate = Callable[[Update, str | None], Awaitable[None]]

_WORD_SECONDS = 10.0
"""How long a server that lacks a push waits for the center's word that it is out."""


class LogFollower:
    """See the module.

    Args:
        contact: to the center.
        replication: to other servers.
        shard store: what this server holds.
        identity: this server's name in views.
        rate: the learning rate of an update.
        on_round: called when an update is applied to every shard here; with the update log as it was then where a checkpoint is
        due.
    """

    def __init__(
        self,
        contact: Contact,
        replication: Replication,
        shard_store: ShardStore,
        *,
        identity: str,
        rate: Callable[[int], float],
        on_update: OnUpdate,
    ) -> None:
        self._contact = contact
        self._replication = replication
        self._shard_store = shard_store
        self._identity = identity
        self._rate, self._on_update = rate, on_update
        self.is_final = False
        """The last update is applied, or somebody else says that it is all over."""
        self.last_cut = ""
        """The update log as it was at the end; empty where this server did not come so far."""

    async def follow(self) -> None:
        """Apply the updates of the update log as they come, until the last.

        Raises:
            RunError: a replica cannot go on.
        """
        while not self.is_final:
            if self._contact.halt == FINISHED:
                # Others have written the last checkpoint, which they do without those that answer for nothing.
                self.is_final = True
                return
            held = self._shard_store.held
            since = held.version
            if since < 0:
                await self._contact.changed.wait(PARK_SECONDS / 4)
                continue
            found = await self._next_updates(held, since)
            if found is not None and self._shard_store.held is held:
                await self._take(held, since, found)

    async def answer(self, log_leader: LogLeader, since: int, *, follower: str, epoch: int) -> Followed:
        """What a follower is told; waits a moment for news. See ``LogLeader.updates``."""
        updates = await log_leader.updates(since, follower=follower, epoch=epoch)
        end = since + len(updates)
        cuts = {version: text for version, text in log_leader.command_log.cuts.items() if since < version <= end}
        is_final = log_leader.is_final and end == log_leader.exposed
        last = ""
        if is_final:
            last = log_leader.command_log.cut()
        began = self._shard_store.held.began
        return Followed(updates=updates, gone=log_leader.gone, is_final=is_final, cuts=cuts, last=last, began=began)

    async def _next_updates(self, held: HistoryState, since: int) -> Followed | None:
        view = self._contact.view
        assert view is not None
        try:
            if held.log_leader is not None:
                return await self.answer(held.log_leader, since, follower=self._identity, epoch=view.epoch)
        except NotPrimary:
            await self._contact.changed.wait(PARK_SECONDS / 4)
            return None
        leader_id = view.chains[LOG_SHARD].primary
        if leader_id == self._identity:
            await self._contact.changed.wait(0.02)  # The update log is about to be opened.
            return None
        answer = await self._replication.ask(leader_id, Follow(since=since), shard=LOG_SHARD, seconds=3 * PARK_SECONDS)
        if answer is None:
            return None
        assert isinstance(answer.body, Followed)
        return answer.body

    async def _take(self, held: HistoryState, since: int, found: Followed) -> None:
        if None not in (found.began, held.began) and found.began != held.began:
            raise RunError(
                f"the update log went back to version {found.began} and the shards to {held.began}: they read two checkpoints"
            )
        for made in found.updates:
            await self._apply(held, made, found.cuts.get(made.number + 1))
            if self._shard_store.held is not held:
                return
        for worker, kept in found.gone.items():
            for replica in held.replicas.values():
                if replica.ready.is_set():
                    replica.state.discard(worker, keep=set(kept))
        if found.is_final and held.version == since + len(found.updates):
            self.is_final = True
            self.last_cut = found.last

    async def _hear_of_the_end(self, held: HistoryState) -> None:
        """An update was made without this server: it was paused or cut off, and others went on. Then it is out, and the contact
        will say so and end all this; only one that is still in has lost something that it acknowledged, and must not go on."""
        view = self._contact.view
        assert view is not None
        await self._contact.newer_than(view.epoch, _WORD_SECONDS)

    async def _apply(self, held: HistoryState, made: Update, cut: str | None) -> None:
        lr = self._rate(made.number)
        for replica in list(held.replicas.values()):
            if replica.version == made.number:
                if replica.state.missing(made):
                    await self._hear_of_the_end(held)
                if self._shard_store.held is not held:
                    return
                await replica.apply(made, lr)
        self._contact.version = held.version
        # A shard that was fetched later is brought up to the others; what they have applied was reported before.
        if self._shard_store.held is held and made.number >= held.told:
            held.told = made.number + 1
            await self._on_update(made, cut)
