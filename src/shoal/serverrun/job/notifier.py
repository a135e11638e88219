"""What the job saw, told to whoever is the center, and to every new center again: it may not have heard what the old one did.

The newest comes first: a run waits for the death of a moment ago, and hardly for one that the center before has dealt with.
"""

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


class Notifier:
    """Tells the center of deaths, and when to stop.

    Args:
        node: on the wire.
        find: where the center is.
    """

    def __init__(self, node: Node, *, find: Find) -> None:
        self._node = node
        self._find = find
        self._news: list[Message] = []
        self._untold: list[Message] = []
        """What the present center has not heard, the newest last."""
        self._address = ""
        self._woken = asyncio.Event()

    def tell(self, message: Message) -> None:
        """To be told as soon as somebody listens. Returns at once."""
        self._news = [*self._news, message][-_REMEMBERED:]
        self._untold.append(message)
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            center = self._find()
            if center is not None and center.address != self._address:
                await self._turn_to(center)
            if center is None or not self._untold:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._woken.wait()
            else:
                await self._tell_next(center)

    async def _turn_to(self, center: Center) -> None:
        if self._address:
            await self._node.connect(self._address).close()
        self._address, self._untold = center.address, list(self._news)

    async def _tell_next(self, center: Center) -> None:
        message = self._untold[-1]
        try:
            await self._node.connect(center.address).call(message, deadline=_ANSWER_SECONDS)
        except WireError:
            await asyncio.sleep(_LOOK_SECONDS / 2)
            return
        # Not by place: more may have been told of meanwhile.
        self._untold = [other for other in self._untold if other is not message]
