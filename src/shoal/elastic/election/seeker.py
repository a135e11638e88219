"""A member's look-out for the center among candidates on other machines: asks each of them, again and again, whether it leads.

Only a candidate itself says that it leads, and only inside its lease: what others believe of it could be over. The highest epoch
counts, and a lower one than was once seen does not any more.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.comm.wire.errors import WireError
from shoal.comm.wire.node import Node
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.elector import Center
from shoal.elastic.election.majority import Found, Seek

_EVERY_SECONDS = 0.2
_ASK_SECONDS = 0.5
_FRESH_SECONDS = 1.0
"""How long a word counts. It was true when it was given; a center that was replaced since is found out by its epoch."""
_STUCK_SECONDS = 3.0
"""After this long without a word a new connection is made: the old one may have waited too long for a cut line to try it soon."""
LOST_SECONDS = 600.0
"""How long a process that has lost its center waits for one: longer than a machine takes to start, and than most cuts of a
network last."""
_TOLD_SECONDS = 10.0
"""How long it is lost before people hear of it."""
_KEY_SECONDS = 5.0
"""How long a process whose key is refused goes on asking: the list may be about to change."""


@dataclass
class _Word:
    """What one candidate said last."""

    center: Center | None = None
    at: float = float("-inf")
    trouble: str = "was not asked yet"
    is_stranger: bool = False
    """It does not talk to this process because of its key, or of the one that this process has for it."""


class Seeker:
    """See the module.

    Args:
        node: this process on the wire; its operations include those of votes.
        candidates: their addresses, each with its key.
        search_seconds: seconds after which a process that has never found a center gives up.
        lost_seconds: seconds after which one gives up that had a center and hears of none any more.
        tell: takes a line for people, when the center is lost and when there is one again.
        clock: seconds.
    """

    def __init__(
        self,
        node: Node,
        candidates: Sequence[str],
        *,
        search_seconds: float,
        lost_seconds: float = LOST_SECONDS,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._candidates = tuple(candidates)
        self._search_seconds, self._lost_seconds = search_seconds, lost_seconds
        self._tell = tell or (lambda line: None)
        self._seen_at = clock()
        self._is_lost = False
        self._clock = clock
        self._began = clock()
        self._words = {address: _Word() for address in self._candidates}
        self._epoch = 0

    def start(self) -> None:
        """Begin to ask; this ends with the node."""
        for address in self._candidates:
            self._node.spawn(self._ask(address))

    def find(self) -> Center | None:
        """Who leads now, as far as is known.

        Raises:
            RequestError: no center was ever found, and the candidates refuse this process's key.
            RunError: no center was ever found, or the last one is lost, and the time for it is over.
        """
        now = self._clock()
        fresh = [word.center for word in self._words.values() if word.center and now - word.at < _FRESH_SECONDS]
        newest = max(fresh, key=lambda center: center.epoch, default=None)
        if newest is not None and newest.epoch >= self._epoch:
            self._epoch, self._seen_at = newest.epoch, now
            if self._is_lost:
                self._is_lost = False
                self._tell(f"there is a center again: {newest.name} of epoch {newest.epoch}")
            return newest
        if not self._epoch:
            self._check_search(now - self._began)
        else:
            self._check_loss(now - self._seen_at)
        return None

    def describe(self) -> str:
        """What each candidate said, for people."""
        return "; ".join(f"{address.partition('#')[0]} {word.trouble}" for address, word in self._words.items())

    def _check_search(self, waited: float) -> None:
        words = self._words.values()
        is_stranger = any(word.is_stranger for word in words) and all(word.at == float("-inf") for word in words)
        if is_stranger and waited > _KEY_SECONDS:
            raise RequestError(
                f"no center talks to this process: {self.describe()}; use the key file of the run, or put this one's public key "
                "(`shoal keys show FILE`) on the list of the centers and their keys behind their addresses"
            )
        if waited > self._search_seconds:
            raise RunError(f"no center was found within {self._search_seconds:g} s: {self.describe()}")

    def _check_loss(self, waited: float) -> None:
        if waited > self._lost_seconds:
            raise RunError(
                f"the center of epoch {self._epoch} was heard last {waited:.0f} s ago, and no other leads: {self.describe()}; "
                "start the centers again, each with its --run-dir, and then this one"
            )
        if waited > _TOLD_SECONDS and not self._is_lost:
            self._is_lost = True
            self._tell(
                f"the center of epoch {self._epoch} was heard last {waited:.0f} s ago: {self.describe()}; waiting for one for "
                f"{self._lost_seconds:g} s"
            )

    async def _ask(self, address: str) -> None:
        word = self._words[address]
        opened = self._clock()
        while True:
            peer = self._node.connect(address)
            try:
                answer = await peer.call(Seek(), deadline=_ASK_SECONDS)
            except WireError:
                word.center = None
                if peer.is_key_refused:
                    word.is_stranger, word.trouble = True, "refused this process's key"
                elif peer.is_key_wrong:
                    word.is_stranger, word.trouble = True, "has another key than the one that it is called by here"
                elif word.is_stranger:
                    pass  # A new connection, on which nothing was said yet.
                elif word.at == float("-inf"):
                    word.trouble = "has not answered; is it up, and is the key behind its address the right one?"
                else:
                    word.trouble = f"has not answered for {self._clock() - word.at:.0f} s"
                if self._clock() - max(opened, word.at) > _STUCK_SECONDS:
                    opened = self._clock()
                    await peer.close()
            else:
                assert isinstance(answer.body, Found)
                self._note(address, answer.body)
            await asyncio.sleep(_EVERY_SECONDS)

    def _note(self, address: str, found: Found) -> None:
        word = self._words[address]
        word.at, word.is_stranger = self._clock(), False
        # The address is the one we have: what a candidate calls itself may not be how this machine reaches it.
        word.center = Center(epoch=found.epoch, address=address, name=found.name) if found.epoch else None
        word.trouble = f"leads epoch {found.epoch}" if found.epoch else "is there and does not lead"
