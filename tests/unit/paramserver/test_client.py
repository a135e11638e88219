"""What a worker tells servers of the weights that a gradient was computed from; the servers are real nodes that write it down."""

import asyncio

import torch

from shoal.comm.wire.node import Node, new_incarnation
from shoal.elastic.election.elector import Center
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.client import Client
from shoal.paramserver.contact import Contact
from shoal.paramserver.messages import OPERATIONS, Done, Join, Joined, Pull, Pulled, Push, Watch, Watched


def test_each_shard_hears_which_version_of_it_a_gradient_was_computed_from(tmp_path):
    """Delay compensation moves a gradient from the weights that it read: of this shard, and not of the furthest behind."""
    ahead = {0: 7, 1: 4}
    pushed = []

    async def run():
        worker, other = (Node(incarnation=new_incarnation(), operations=OPERATIONS) for _ in range(2))

        async def answer(request):
            match request.body:
                case Join():
                    await request.answer(Joined())
                case Watch(epoch=epoch):
                    if epoch < view.epoch:
                        await request.answer(Watched(view=view, halt="", stopped=""))
                case Pull(shard=shard):
                    await request.answer(Pulled(version=ahead[shard]), payload=torch.zeros(2))
                case Push():
                    pushed.append((request.body.number, request.body.shard, request.body.version))
                    await request.answer(Done())

        address = await other.listen(f"ipc://{tmp_path}/other.sock", answer)
        server = Member(id=other.incarnation, name="server-0", role="server", address=address)
        here = Member(id=worker.incarnation, name="worker-0", role="worker")
        chain = Chain(primary=server.id)
        view = View(epoch=3, servers=(server,), workers=(here,), chains=(chain, chain))

        def introduce(view):
            return Join(name="worker-0", role="worker", address="", model={}, view=view)

        contact = Contact(worker, find=lambda: Center(epoch=3, address=address, name="center-0"), introduce=introduce)
        contact.start()
        try:
            assert await contact.newer_than(0, 30.0)
            stretches = [slice(0, 2), slice(2, 4)]
            client = Client(worker, contact, weights=torch.zeros(4), stretches=stretches, deadline_seconds=30.0)
            assert await client.pull(0) == 4
            await client.push(torch.ones(4), version=4)
            # Weights that were fetched in the background since are not those of the gradient.
            ahead.update({0: 9, 1: 8})
            assert await client.pull(5) == 8
            await client.push(torch.ones(4), version=4)
        finally:
            await contact.stop()
            await worker.close()
            await other.close()

    asyncio.run(run())
    assert sorted(pushed) == [(0, 0, 7), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
