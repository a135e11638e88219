"""From a primary to the other replicas of its shard: what it acknowledges is brought to all of them first.

A replica that dies leaves the view, and is waited for no longer. One that lives and does not take what it is sent would hold the
whole run up, so the center is told, which takes it out of the chain and lets it begin anew.
"""

from collections.abc import Callable

from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.node import Node
from shoal.comm.wire.peer import Answer, Peer
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.elastic.view import View
from shoal.paramserver.contact import Contact
from shoal.paramserver.messages import Failed, Message
from shoal.paramserver.waiting import ATTEMPT_SECONDS, Moved, NotPrimary, seconds_for

_AGAIN_SECONDS = 0.02
_BROKEN = frozenset({"failed", "broken"})
"""Refusals of a server that cannot, not of one that is not to."""
_REPORT_AFTER = 0.25
"""The part of the deadline after which a replica that does not answer is reported."""


class Replication:
    """A server's calls to other servers.

    Args:
        node: on the wire.
        contact: to the center.
        deadline_seconds: after which a peer that should answer has failed.
        attempt_seconds: of one attempt, without what its payload takes.
    """

    def __init__(
        self, node: Node, contact: Contact, *, deadline_seconds: float, attempt_seconds: float = ATTEMPT_SECONDS
    ) -> None:
        self._node = node
        self._contact = contact
        self._deadline = deadline_seconds
        self._attempt = attempt_seconds

    async def ask(self, member: str, message: Message, *, shard: int, seconds: float) -> Answer | None:
        """Ask a shard's primary something, once; None when that came to nothing, and the view may tell why.

        Raises:
            RunError: what is asked for is not there any more, so asking again is no use.
        """
        view = self._contact.view
        assert view is not None
        call = self._peer(view, member).call(message, key=f"shard/{shard}", deadline=seconds)
        try:
            return await self._contact.while_needed(call, lambda new: new.chains[shard].primary == member)
        except (WireTimeout, Refused, Moved) as error:
            if isinstance(error, Refused) and error.code == "trimmed":
                raise RunError(error.text) from error
            await self._contact.newer_than(view.epoch, _AGAIN_SECONDS)
            return None

    async def replicate(
        self, shard: int, message: Message, *, is_current: Callable[[], bool], payload: memoryview | None = None
    ) -> None:
        """Bring something to every other member of a shard's chain, until it is there or the member is gone.

        Args:
            shard: whose chain.
            message: what.
            is_current: False when what is sent belongs to a time that is over.
            payload: sent with it.

        Raises:
            NotPrimary: this server answers for the shard no longer.
            RunError: a replica did not take it, and the center did not take it out of the chain, for too long.
        """
        limit = Deadline(seconds=self._deadline)
        report = Deadline(seconds=self._deadline * _REPORT_AFTER)
        waiting: set[str] | None = None
        while True:
            view = require_primary(self._contact.view, shard, self._node.instance_id)
            if not is_current():
                raise NotPrimary(f"shard {shard} went back to the checkpoint")
            others = set(view.chains[shard].replicas) - {self._node.instance_id}
            # One that joins later gets a copy of the shard that has this in it.
            waiting = others if waiting is None else waiting & others
            for member in sorted(waiting):
                trouble = await self._bring(view, member, shard, message, payload)
                if trouble is None:
                    waiting.discard(member)
                    continue
                code, text = trouble
                if code in _BROKEN or report.is_over:
                    await self._report(view, member, shard, text)
                    report = Deadline(seconds=self._deadline * _REPORT_AFTER)
                if limit.is_over:
                    raise RunError(f"backup {member} of shard {shard} did not answer for {self._deadline:g} s: {text}")
                await self._contact.newer_than(view.epoch, _AGAIN_SECONDS)
            if not waiting:
                return

    async def _bring(
        self, view: View, member: str, shard: int, message: Message, payload: memoryview | None
    ) -> tuple[str, str] | None:
        """One attempt at one member; a code and a text when it did not succeed."""
        seconds = seconds_for(0 if payload is None else payload.nbytes, base=self._attempt)
        call = self._peer(view, member).call(message, key=f"shard/{shard}", payload=payload, deadline=seconds)
        try:
            await self._contact.while_needed(call, lambda new: member in new.chains[shard].replicas)
        except WireTimeout as error:
            return "timeout", str(error)
        except Refused as refused:
            return refused.code, refused.text
        except Moved:
            return "moved", "it left the chain"
        return None

    async def _report(self, view: View, member: str, shard: int, reason: str) -> None:
        failed = Failed(shard=shard, server=member, epoch=view.epoch, reason=reason)
        try:
            await self._contact.tell(failed, deadline=self._attempt)
        except TimeoutError:
            return  # There is no center just now; it is told with the next attempt.

    def _peer(self, view: View, member: str) -> Peer:
        return self._node.connect(view.member(member).address)


def require_primary(view: View | None, shard: int, server: str) -> View:
    """The view, if this server answers for the shard in it.

    Raises:
        NotPrimary: it does not.
    """
    if view is None or not 0 <= shard < len(view.chains) or view.chains[shard].primary != server:
        raise NotPrimary(f"this server does not answer for shard {shard}")
    return view
