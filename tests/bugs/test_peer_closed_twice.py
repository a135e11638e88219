"""A member never found a center again that had been paused for long.

Its watch of the center and its search for one use the same peer. The watch gave the silent center up and closed the peer; the
search, whose request ended with that, had heard nothing for long either and closed it too. A peer that was closed twice raised,
the search for that candidate ended without a word, and when the center woke and was elected, its members did not hear of it.
"""

import asyncio

from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.election.majority import OPERATIONS, Found
from shoal.elastic.election.seeker import Seeker


def test_a_search_goes_on_when_somebody_else_closed_its_connection(tmp_path):
    now = 1000.0

    async def run():
        nonlocal now
        asked, is_awake = asyncio.Event(), asyncio.Event()
        center, member = (Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(2))

        async def answer(request):
            asked.set()
            if is_awake.is_set():
                await request.answer(Found(7, "center-0", ""))

        address = await center.listen(f"ipc://{tmp_path}/c.sock", answer)
        seeker = Seeker(member, [address], search_seconds=1e9, clock=lambda: now)
        try:
            seeker.start()
            async with asyncio.timeout(60.0):
                await asked.wait()
                now += 1000.0
                await member.connect(address).close()
                is_awake.set()
                while (found := seeker.find()) is None:
                    await asyncio.sleep(0.01)
            return found
        finally:
            await member.close()
            await center.close()

    assert asyncio.run(run()).epoch == 7
