"""What the crew saw, told to whoever is the center, and to every new center again: it may not have heard what the old one did."""

import asyncio
import contextlib

from shoal.comm.wire.errors import WireError
from shoal.comm.wire.node import Node
from shoal.elastic.election.elector import Center
from shoal.paramserver.contact import Find
from shoal.paramserver.messages import Message

_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_REMEMBERED = 256


class Herald:
    """Tells the center of deaths, and when to stop.

    Args:
        node: on the wire.
        find: where the center is.
    """

    def __init__(self, node: Node, *, find: Find) -> None:
        self._node = node
        self._find = find
        self._news: list[Message] = []
        self._num_told = 0
        self._address = ""
        self._woken = asyncio.Event()

    def tell(self, message: Message) -> None:
        """To be told as soon as somebody listens. Returns at once."""
        self._news.append(message)
        while len(self._news) > _REMEMBERED:
            del self._news[0]
            self._num_told = max(0, self._num_told - 1)
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            center = self._find()
            if center is not None and center.address != self._address:
                await self._turn_to(center)
            if center is None or self._num_told == len(self._news):
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._woken.wait()
            else:
                await self._tell_next(center)

    async def _turn_to(self, center: Center) -> None:
        if self._address:
            await self._node.connect(self._address).close()
        self._address, self._num_told = center.address, 0

    async def _tell_next(self, center: Center) -> None:
        message = self._news[self._num_told]
        try:
            await self._node.connect(center.address).call(message, deadline=_ANSWER_SECONDS)
        except WireError:
            await asyncio.sleep(_LOOK_SECONDS / 2)
            return
        self._num_told = min(self._num_told + 1, len(self._news))
