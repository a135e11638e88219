"""What a server holds, and how each new view changes it: shards taken up and put down, the book kept or followed.

Everything of one history is in one ``Held``. When everyone goes back to the checkpoint a new one takes its place, and whatever
was under way for the old one sees that it is not current any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import RunError
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.contact import Contact
from shoal.paramserver.log.commands import Input, Ledger
from shoal.paramserver.log.leader import PARK_SECONDS, Steward
from shoal.paramserver.messages import Fetch, Fetched, Note, Synced
from shoal.paramserver.server.replica import Replica, unpack
from shoal.paramserver.server.replication import Relay, require_primary
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.waiting import NotPrimary, seconds_for

BOOK_SHARD = 0
"""The shard whose primary keeps the book."""
_STATE_ROWS = 8
"""How much a shard's whole state is, in rows of its weights: those, the optimizer's, and gradients that wait."""


@dataclass(eq=False, kw_only=True)
class Held:
    """Everything that a server holds of one history."""

    history: int = 0
    since: int = 0
    """The epoch of the first view of this history that came here; who asks under a lower one means an earlier history."""
    replicas: dict[int, Replica] = field(default_factory=dict)
    ledger: Ledger | None = None
    """A backup's book; the primary's is the steward's."""
    steward: Steward | None = None
    keeper: str = ""
    """Whose book ``ledger`` is a copy of."""
    early: list[Note] = field(default_factory=list)
    """Inputs of the book that came before the book itself."""
    is_copying: bool = False
    """True while the book of a new keeper is fetched."""
    began: int | None = None
    """The version that the shards made here began with; None where all were fetched from others."""
    told: int = -1
    """Rounds that were reported as applied."""

    @property
    def version(self) -> int:
        """What every shard here has reached; -1 without any."""
        return min((replica.version for replica in self.replicas.values() if replica.ready.is_set()), default=-1)

    def drop(self, shard: int) -> None:
        """Put a shard down."""
        self.replicas.pop(shard, None)
        if shard == BOOK_SHARD:
            self.close_book()

    def close_book(self) -> None:
        """Put the book down."""
        if self.steward is not None:
            self.steward.close()
        self.steward = self.ledger = None
        self.keeper, self.early = "", []


class Shelf:
    """See the module.

    Args:
        contact: to the center.
        relay: to other servers.
        identity: this server's name in views.
        make_shard: a shard as it is before the first round, or as the checkpoint has it.
        make_copy: a shard to be filled with another server's copy.
        make_ledger: the book likewise.
        go_back: called when a history begins that is not the first, before anything is made for it.
        start: runs something beside.
        deadline_seconds: the longest wait for a copy of a shard.
    """

    def __init__(
        self,
        contact: Contact,
        relay: Relay,
        *,
        identity: str,
        make_shard: Callable[[int], ShardState],
        make_copy: Callable[[int], ShardState],
        make_ledger: Callable[[], Ledger],
        go_back: Callable[[View], Awaitable[None]],
        start: Callable[[Coroutine[Any, Any, None]], None],
        deadline_seconds: float,
    ) -> None:
        self._contact = contact
        self._relay = relay
        self._identity = identity
        self._make_shard, self._make_copy, self._make_ledger = make_shard, make_copy, make_ledger
        self._go_back = go_back
        self._start = start
        self._deadline = deadline_seconds
        self.held = Held()

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

    def require_steward(self) -> Steward:
        """The book, if this server keeps it.

        Raises:
            NotPrimary: it does not.
        """
        self.require(BOOK_SHARD)
        if self.held.steward is None:
            raise NotPrimary("this server does not keep the book")
        return self.held.steward

    async def adopt_views(self) -> None:
        """Take up the shards that each new view gives this server, and put down those it takes away; until cancelled.

        Beside the contact and not inside it: making a shard takes long, and signs of life must go on.
        """
        adopted: View | None = None
        while True:
            view = self._contact.view
            if view is None or view is adopted:
                await self._contact.bell.wait(PARK_SECONDS)
                continue
            await self._adopt(view)
            adopted = view

    async def _adopt(self, view: View) -> None:
        if view.history != self.held.history:
            # Everyone goes back to the checkpoint: what is here was made of rounds that never were.
            self.held.close_book()
            self.held = Held(history=view.history, since=view.epoch)
            await self._go_back(view)
        for shard, chain in enumerate(view.chains):
            await self._adopt_chain(shard, chain)
        self._adopt_book(view.chains[BOOK_SHARD])
        for replica in self.held.replicas.values():
            replica.bell.ring()

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
            if shard == BOOK_SHARD:
                held.ledger, held.keeper = self._make_ledger(), chain.primary
        elif not replica.ready.is_set():
            raise RunError(f"shard {shard} is said to be here, and its copy is still on its way")

    def _adopt_book(self, chain: Chain) -> None:
        held = self.held
        if self._identity == chain.primary and held.steward is None:
            assert held.ledger is not None, "a primary of shard 0 has its book"
            held.steward, held.ledger = Steward(held.ledger, replicate=self._replicate_of(held)), None
            held.keeper = self._identity
            self._start(self._keep(held.steward))
        elif held.ledger is not None and held.keeper != chain.primary and not held.is_copying:
            # The one before may have told this server something that the new keeper never heard, or the other way round.
            held.is_copying = True
            self._start(self._copy_book(held))

    def _replicate_of(self, held: Held) -> Callable[[int, Input], Awaitable[None]]:
        async def replicate(place: int, given: Input) -> None:
            note = Note(place=place, text=given.encode())
            await self._relay.send_on(BOOK_SHARD, note, is_current=lambda: self.held is held)

        return replicate

    async def _keep(self, steward: Steward) -> None:
        await steward.begin()
        self._start(self._meet_workers(steward))
        self._start(self._trim(steward))
        await steward.keep_time()

    async def _trim(self, steward: Steward) -> None:
        while not steward.is_closed:
            await asyncio.sleep(PARK_SECONDS)
            view = self._contact.view
            # A shard that is being copied will ask for every round since the copy was made.
            if view is not None and not any(chain.joining for chain in view.chains):
                servers = {server for chain in view.chains for server in chain.replicas}
                await steward.trim(servers, epoch=view.epoch)

    async def _meet_workers(self, steward: Steward) -> None:
        """Tell the book who comes and who goes, and when to stop."""
        while not steward.is_closed:
            view = self._contact.view
            assert view is not None
            book = steward.ledger.book
            present = {member.id: member for member in view.workers}
            went = sorted(book.members.keys() - present.keys())
            came = sorted(present.keys() - book.members.keys() - set(book.gone))
            if self._contact.halt:
                steward.halt()
            if went:
                await steward.leave(went[0])
            elif came:
                await steward.join(came[0], index_of(present[came[0]]))
            else:
                await self._contact.bell.wait(PARK_SECONDS)

    # -- copies from others -----------------------------------------------------------------------------------------------------

    async def _sync(self, held: Held, shard: int, replica: Replica) -> None:
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
            sender, book, tensors, values = found
            await asyncio.to_thread(state.restore, tensors, values)
            if self.held is not held or held.replicas.get(shard) is not replica:
                return
            if shard == BOOK_SHARD:
                self._open_copy(held, sender, book)
            replica.fill(state)
        while self._order_of(shard) == replica.order:
            view = self._contact.view
            assert view is not None
            try:
                await self._contact.tell(Synced(shard=shard, order=replica.order), deadline=self._deadline)
            except TimeoutError:
                continue  # There is no center; the shard is as good without it, and is told to the next one.
            await self._contact.newer_than(view.epoch, PARK_SECONDS)

    async def _copy_book(self, held: Held) -> None:
        """Take the new keeper's book in place of the old one's; until then none of its inputs is taken here."""
        try:
            while self.held is held and held.ledger is not None:
                view = self._contact.view
                assert view is not None
                chain = view.chains[BOOK_SHARD]
                if held.keeper == chain.primary or self._identity not in chain.synced[1:]:
                    return
                found = await self._fetch(BOOK_SHARD, held.replicas[BOOK_SHARD].state.weights.nbytes)
                if found is not None and self.held is held and held.ledger is not None:
                    self._open_copy(held, found[0], found[1])
        finally:
            held.is_copying = False

    def _open_copy(self, held: Held, keeper: str, book: bytes) -> None:
        ledger = Ledger.restore(book)
        for note in sorted(held.early, key=lambda early: early.place):
            if note.place == ledger.place + 1:
                ledger.enter(Input.decode(note.text))
        held.ledger, held.keeper, held.early = ledger, keeper, []

    async def _fetch(self, shard: int, row_bytes: int) -> tuple[str, bytes, dict[str, Any], dict[str, Any]] | None:
        view = self._contact.view
        assert view is not None
        primary = view.chains[shard].primary
        if primary == self._identity:
            await self._contact.newer_than(view.epoch, PARK_SECONDS)
            return None
        seconds = seconds_for(_STATE_ROWS * row_bytes, base=self._deadline)
        answer = await self._relay.ask(primary, Fetch(shard=shard), shard=shard, seconds=seconds)
        if answer is None:
            return None
        found = answer.body
        assert isinstance(found, Fetched) and answer.payload is not None
        book_end, text_end = found.book_bytes, found.book_bytes + found.text_bytes
        # In a thread, as at the other end: signs of life go on while a large shard is copied.
        text, rows = bytes(answer.payload[book_end:text_end]), answer.payload[text_end:]
        tensors, values = await asyncio.to_thread(unpack, text, rows)
        return primary, bytes(answer.payload[:book_end]), tensors, values

    def _order_of(self, shard: int) -> int | None:
        """The order under which this server is to become a backup of a shard; None when it is one, or is not to be."""
        view = self._contact.view
        assert view is not None
        return next((one.order for one in view.chains[shard].joining if one.server == self._identity), None)


def index_of(worker: Member) -> int:
    """Which share a worker prefers: the number at the end of its name."""
    tail = worker.name.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() else 0
