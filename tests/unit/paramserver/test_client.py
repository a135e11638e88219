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

    async def run(client):
        read = await client.pull(0)
        assert read == (7, 4)
        await client.push(torch.ones(4), read=read)
        # Fetched in the background meanwhile: not those of the gradient, also where the shard furthest behind is the same.
        ahead.update({0: 9, 1: 4})
        newer = await client.pull(0)
        assert newer == (9, 4)
        await client.push(torch.ones(4), read=read)
        await client.push(torch.ones(4), read=newer)

    pushed = run_with_servers(tmp_path, ahead, run)
    assert sorted(pushed) == [(0, 0, 7), (0, 1, 4), (1, 0, 7), (1, 1, 4), (2, 0, 9), (2, 1, 4)]


def test_a_server_that_took_over_and_is_behind_does_not_make_weights_older_that_are_here(tmp_path):
    """It has nothing new to send, so the weights stay those that were read from the one before it."""
    ahead = {0: 7, 1: 7}

    async def run(client):
        assert await client.pull(0) == (7, 7)
        ahead.update({0: 5, 1: 8})
        assert await client.pull(0) == (7, 8)
        assert client._weights.tolist() == [7.0, 7.0, 8.0, 8.0]

    run_with_servers(tmp_path, ahead, run)


def run_with_servers(tmp_path, ahead, use):
    """Let somebody use a client of two shards of two numbers, each its version; the pushes as (number, shard, version)."""
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
                case Pull(shard=shard, have=have) if have >= ahead[shard]:
                    await request.answer(Pulled(version=ahead[shard], is_new=False))
                case Pull(shard=shard):
                    await request.answer(Pulled(version=ahead[shard]), payload=torch.full((2,), float(ahead[shard])))
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
            await use(client)
        finally:
            await contact.stop()
            await worker.close()
            await other.close()

    asyncio.run(run())
    return pushed
