"""What the job saw reaches every center, the newest first."""

import asyncio

from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.election.elector import Center
from shoal.paramserver.messages import OPERATIONS, Dead, Done
from shoal.serverrun.job.processes import Notifier


class Listening:
    """Somebody at a center's address, who writes down what is told."""

    def __init__(self, path, name):
        self.node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
        self.center = Center(epoch=1, address=f"ipc://{path}/{name}.sock", name=name)
        self.heard = []
        self.arrived = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def open(self):
        await self.node.listen(self.center.address, self.handle)

    async def handle(self, request):
        self.heard.append(request.body.member)
        self.arrived.set()
        await self.may_answer.wait()
        await request.answer(Done())

    async def until(self, count):
        while len(self.heard) < count:
            self.arrived.clear()
            await self.arrived.wait()


def dead(member):
    return Dead(member=member, reason="killed")


def test_the_newest_death_does_not_wait_for_the_telling_of_older_ones(tmp_path):
    async def run():
        node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
        first, second = Listening(tmp_path, "center-0"), Listening(tmp_path, "center-1")
        found = [None]
        notifier = Notifier(node, find=lambda: found[0])
        telling = asyncio.ensure_future(notifier.run())
        try:
            async with asyncio.timeout(30):
                await first.open()
                await second.open()
                second.may_answer.set()
                for member in "abc":
                    notifier.tell(dead(member))
                found[0] = first.center
                await first.until(1)
                notifier.tell(dead("d"))
                first.may_answer.set()
                await first.until(4)
                found[0] = second.center
                await second.until(4)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            for one in (node, first.node, second.node):
                await one.close()
        # "c" was under way when "d" died; a new center hears everything again.
        assert first.heard == ["c", "d", "b", "a"]
        assert second.heard == ["d", "c", "b", "a"]

    asyncio.run(run())
