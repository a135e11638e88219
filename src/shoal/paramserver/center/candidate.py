"""A candidate for the center on one of several machines: its vote, its part as the center, and its end, all at one address.

Candidates that were started for different runs, or with different recipes, would elect one that turns every member away. So each
asks the others, once, when it starts; the one that came later and differs goes.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.comm.wire.errors import WireError
from shoal.comm.wire.listener import Request
from shoal.comm.wire.node import Node
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.etcd import EtcdLease
from shoal.elastic.election.filelease import boot_seconds
from shoal.elastic.election.majority import OPERATIONS as VOTES
from shoal.elastic.election.majority import Poll, Renew, Resigned, Seek
from shoal.elastic.election.voters import Sole, Voters
from shoal.elastic.membership import Wanted
from shoal.elastic.view import View
from shoal.paramserver.center.center import Center, find_setting_difference
from shoal.paramserver.messages import OPERATIONS, Done, Greet, Greeted, Over

CLUSTER_OPERATIONS = OPERATIONS | VOTES
"""What processes of one run on several machines may ask each other."""

_GREET_SECONDS = 3.0
_OVER_SECONDS = 2.0
_LOOK_SECONDS = 1.0


class Candidate:
    """See the module.

    Args:
        node: on the wire; it is to listen with ``handle``.
        elector: ``Voters`` on this node, ``EtcdLease``, or ``Sole``.
        name: who this is.
        others: the addresses of the other candidates.
        wanted: what the run asked for.
        settings: what the recipe says of everything that all must agree on.
        lonely_seconds: how long a voter that hears of no other waits before it gives up.
        tell: takes a line for people.
        on_view: told of every view that is published, and why it is.
    """

    def __init__(
        self,
        node: Node,
        elector: Voters | Sole | EtcdLease,
        *,
        name: str,
        others: Sequence[str],
        wanted: Wanted,
        settings: Mapping[str, str],
        lonely_seconds: float,
        tell: Callable[[str], None],
        on_view: Callable[[View, str], None] = lambda view, cause: None,
    ) -> None:
        self._node = node
        self._elector = elector
        self._name = name
        self._others = tuple(others)
        self._settings = dict(settings)
        self._lonely = lonely_seconds
        self._tell = tell
        self.center = Center(node, elector, wanted=wanted, tell=tell, settings=settings, on_view=on_view)
        self._told_over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handle(self, request: Request) -> None:
        """Answer a voter, a candidate or a member."""
        match request.body:
            case Poll() | Renew() | Resigned() | Seek():
                await self._elector.answer(request)
            case Greet(name=name, settings=settings):
                difference = find_setting_difference(self._settings, settings, here=self._name, there=name)
                if difference is not None:
                    self._tell(f"candidate {name} is of another run: {difference}")
                await request.answer(Greeted(difference=difference or ""))
            case Over(halt=halt):
                if not self._told_over.done():
                    self._told_over.set_result(halt)
                await request.answer(Done())
            case _:
                await self.center.handle(request)

    async def run(self) -> str:
        """Vote, and lead when elected, until the run has ended.

        Returns:
            Why the run was stopped; empty when it was finished.

        Raises:
            RequestError: the run cannot begin, or this candidate is of another run than the others.
            RunError: no other voter was heard of for too long.
        """
        leading = asyncio.ensure_future(self.center.run())
        looking = asyncio.ensure_future(self._look_around())
        try:
            ends: list[asyncio.Future[Any]] = [leading, looking, self._told_over]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
            if self._told_over.done():
                return self._told_over.result()
            try:
                halt = leading.result()
            except RequestError as error:
                # Nobody came, and nobody will come to the next center either.
                await self._send_over(str(error))
                raise
            await self._send_over(halt)
            return halt
        finally:
            leading.cancel()
            looking.cancel()
            await asyncio.gather(leading, looking, return_exceptions=True)

    async def _look_around(self) -> None:
        """Greet the others, then see that there are any."""
        await asyncio.gather(*(self._greet(address) for address in self._others))
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if isinstance(self._elector, Voters) and boot_seconds() - self._elector.heard_at > self._lonely:
                raise RunError(
                    f"{self._name} has heard of no other center for {self._lonely:g} s and gives up; there should be "
                    + ", ".join(address.partition("#")[0] for address in self._others)
                )

    async def _greet(self, address: str) -> None:
        try:
            greet = Greet(name=self._name, settings=self._settings)
            answer = await self._node.connect(address).call(greet, deadline=_GREET_SECONDS)
        except WireError:
            return  # Not up yet: then it will greet.
        assert isinstance(answer.body, Greeted)
        if answer.body.difference:
            raise RequestError(
                f"{self._name} is of another run than the center at {address.partition('#')[0]}: {answer.body.difference}; "
                "start all of them with the same recipe, plan and settings"
            )

    async def _send_over(self, halt: str) -> None:
        async def send(address: str) -> None:
            try:
                await self._node.connect(address).call(Over(halt=halt), deadline=_OVER_SECONDS, attempts=2)
            except WireError:
                self._tell(f"the center at {address.partition('#')[0]} could not be told that the run is over")

        await asyncio.gather(*(send(address) for address in self._others))
