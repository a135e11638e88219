"""A server follows the log: it asks the book's keeper for rounds and applies them, in order, to every shard it holds."""

from collections.abc import Awaitable, Callable

from shoal.core.errors import RunError
from shoal.paramserver.contact import Contact
from shoal.paramserver.log.leader import PARK_SECONDS, Steward
from shoal.paramserver.messages import FINISHED, Follow, Followed
from shoal.paramserver.records import Round
from shoal.paramserver.server.replication import Relay
from shoal.paramserver.server.store import BOOK_SHARD, Held, Shelf
from shoal.paramserver.waiting import NotPrimary

OnRound = Callable[[Round, str | None], Awaitable[None]]

_WORD_SECONDS = 10.0
"""How long a server that lacks a contribution waits for the center's word that it is out."""


class Follower:
    """See the module.

    Args:
        contact: to the center.
        relay: to other servers.
        shelf: what this server holds.
        identity: this server's name in views.
        rate: the learning rate of a round.
        on_round: called when a round is applied to every shard here; with the book as it was then where a checkpoint is due.
    """

    def __init__(
        self,
        contact: Contact,
        relay: Relay,
        shelf: Shelf,
        *,
        identity: str,
        rate: Callable[[int], float],
        on_round: OnRound,
    ) -> None:
        self._contact = contact
        self._relay = relay
        self._shelf = shelf
        self._identity = identity
        self._rate, self._on_round = rate, on_round
        self.is_final = False
        """The last round is applied, or somebody else says that it is all over."""
        self.last_cut = ""
        """The book as it was at the end; empty where this server did not come so far."""

    async def follow(self) -> None:
        """Apply the rounds of the book as they come, until the last.

        Raises:
            RunError: a replica cannot go on.
        """
        while not self.is_final:
            if self._contact.halt == FINISHED:
                # Others have written the last checkpoint, which they do without those that answer for nothing.
                self.is_final = True
                return
            held = self._shelf.held
            since = held.version
            if since < 0:
                await self._contact.bell.wait(PARK_SECONDS / 4)
                continue
            found = await self._next_rounds(held, since)
            if found is not None and self._shelf.held is held:
                await self._take(held, since, found)

    async def answer(self, steward: Steward, since: int, *, follower: str, epoch: int) -> Followed:
        """What a follower is told; waits a moment for news. See ``Steward.rounds``."""
        rounds = await steward.rounds(since, follower=follower, epoch=epoch)
        end = since + len(rounds)
        cuts = {version: text for version, text in steward.ledger.cuts.items() if since < version <= end}
        is_final = steward.is_final and end == steward.exposed
        last = ""
        if is_final:
            last = steward.ledger.cut()
        began = self._shelf.held.began
        return Followed(rounds=rounds, gone=steward.gone, is_final=is_final, cuts=cuts, last=last, began=began)

    async def _next_rounds(self, held: Held, since: int) -> Followed | None:
        view = self._contact.view
        assert view is not None
        try:
            if held.steward is not None:
                return await self.answer(held.steward, since, follower=self._identity, epoch=view.epoch)
        except NotPrimary:
            await self._contact.bell.wait(PARK_SECONDS / 4)
            return None
        keeper = view.chains[BOOK_SHARD].primary
        if keeper == self._identity:
            await self._contact.bell.wait(0.02)  # The book is about to be opened.
            return None
        answer = await self._relay.ask(keeper, Follow(since=since), shard=BOOK_SHARD, seconds=3 * PARK_SECONDS)
        if answer is None:
            return None
        assert isinstance(answer.body, Followed)
        return answer.body

    async def _take(self, held: Held, since: int, found: Followed) -> None:
        if None not in (found.began, held.began) and found.began != held.began:
            raise RunError(
                f"the book went back to version {found.began} and the shards here to {held.began}: they read two checkpoints"
            )
        for made in found.rounds:
            await self._apply(held, made, found.cuts.get(made.number + 1))
            if self._shelf.held is not held:
                return
        for worker, kept in found.gone.items():
            for replica in held.replicas.values():
                if replica.ready.is_set():
                    replica.state.discard(worker, keep=set(kept))
        if found.is_final and held.version == since + len(found.rounds):
            self.is_final = True
            self.last_cut = found.last

    async def _hear_of_the_end(self, held: Held) -> None:
        """A round was made without this server: it was paused or cut off, and others went on. Then it is out, and the contact
        will say so and end all this; only one that is still in has lost something that it acknowledged, and must not go on."""
        view = self._contact.view
        assert view is not None
        await self._contact.newer_than(view.epoch, _WORD_SECONDS)

    async def _apply(self, held: Held, made: Round, cut: str | None) -> None:
        lr = self._rate(made.number)
        for replica in list(held.replicas.values()):
            if replica.version == made.number:
                if replica.state.missing(made):
                    await self._hear_of_the_end(held)
                if self._shelf.held is not held:
                    return
                await replica.apply(made, lr)
        self._contact.version = held.version
        # A shard that was fetched later is brought up to the others; what they have applied was reported before.
        if self._shelf.held is held and made.number >= held.told:
            held.told = made.number + 1
            await self._on_round(made, cut)
