"""What a worker tells servers of the weights that a gradient was computed from; the servers are real nodes that write it down."""

import asyncio

import pytest
import torch

from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.errors import RunError
from shoal.elastic.election.elector import Center
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.contact import Contact
from shoal.paramserver.messages import (
    OPERATIONS,
    Done,
    Failed,
    Join,
    Joined,
    Part,
    Pull,
    Pulled,
    Push,
    ReplicatePush,
    Watch,
    Watched,
)
from shoal.paramserver.server.replication import Replication
from shoal.paramserver.worker.client import Client


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


@pytest.mark.parametrize("does", ["pull", "push", "part"])
def test_weights_that_take_longer_than_an_attempt_without_any_still_come(tmp_path, does):
    """An attempt had 2 s for everything, whatever crossed: a shard that took longer began again at its first byte for ever."""
    numel = 2_000_000
    ahead = {0: 7, 1: 4}

    async def run(client):
        read = await client.pull(0) if does == "pull" else (7, 4)
        if does == "push":
            await client.push(torch.ones(numel), read=read)
        elif does == "part":
            await client.add_part(torch.ones(numel), evaluation=0, unit=0, loss=0.5)
        assert read == (7, 4)

    # Slower than an attempt without a payload, and much faster than the slowest link that is allowed for.
    run_with_servers(tmp_path, ahead, run, numel=numel, takes=0.5, attempt_seconds=0.1, deadline_seconds=0.3)


SHORT = {"attempt_seconds": 0.1, "deadline_seconds": 0.3}


@pytest.mark.parametrize(
    ("sends", "words"),
    [
        (lambda row: None, "says new weights and sent none"),
        (lambda row: row[:0], "did not answer pull"),
        (lambda row: row[:-1], "did not answer pull"),
        (lambda row: row.view(torch.int32), "did not answer pull"),
    ],
    ids=["nothing", "no bytes", "too few", "another type"],
)
def test_an_answer_without_the_weights_that_it_speaks_of_is_not_taken_for_them(tmp_path, sends, words):
    """What lay in the worker's memory passed for the newest weights."""

    async def run(client):
        with pytest.raises(RunError, match=words):
            await client.pull(0)
        assert client.versions == [-1, -1]

    # The one is an answer that ends the call; the others are waited for until the deadline.
    limits = {"attempt_seconds": 10.0, "deadline_seconds": 30.0} if "sent none" in words else SHORT
    run_with_servers(tmp_path, {0: 7, 1: 7}, run, sends=sends, **limits)


def test_a_forward_has_the_time_that_its_payload_needs(tmp_path):
    """A healthy backup on a slow link was reported to the center, which took it out of the chain."""
    gradient = memoryview(bytearray(8_000_000))
    reported = []

    async def run():
        here, other = (Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(2))

        async def answer(request):
            match request.body:
                case Join():
                    await request.answer(Joined())
                case Watch(epoch=epoch):
                    if epoch < view.epoch:
                        await request.answer(Watched(view=view, halt="", stopped=""))
                case Failed():
                    reported.append(request.body)
                    await request.answer(Done())
                case ReplicatePush():
                    await asyncio.sleep(0.5)
                    await request.answer(Done())

        address = await other.listen(f"ipc://{tmp_path}/other.sock", answer)
        members = [
            Member(id=node.instance_id, name=f"server-{place}", role="server", address=address)
            for place, node in enumerate((here, other))
        ]
        chain = Chain(primary=here.instance_id, backups=(other.instance_id,))
        view = View(epoch=3, servers=tuple(members), workers=(), chains=(chain,))

        def introduce(view):
            return Join(name="server-0", role="server", address="", model={}, view=view)

        contact = Contact(here, find=lambda: Center(epoch=3, address=address, name="center-0"), introduce=introduce)
        contact.start()
        try:
            assert await contact.newer_than(0, 30.0)
            replication = Replication(here, contact, deadline_seconds=0.4, attempt_seconds=0.1)
            forward = ReplicatePush(worker="w", push=Push(shard=0, number=0, version=0))
            await replication.replicate(0, forward, is_current=lambda: True, payload=gradient)
        finally:
            await contact.stop()
            await here.close()
            await other.close()

    asyncio.run(run())
    assert not reported


def run_with_servers(
    tmp_path, ahead, use, *, numel=4, takes=0.0, sends=lambda row: row, attempt_seconds=2.0, deadline_seconds=30.0
):
    """Let somebody use a client of two shards of half the numbers, each its version; the pushes as (number, shard, version)."""
    pushed = []
    half = numel // 2

    async def run():
        worker, other = (Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(2))

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
                    await asyncio.sleep(takes)
                    row = torch.full((half,), float(ahead[shard]))
                    await request.answer(Pulled(version=ahead[shard]), payload=sends(row))
                case Part():
                    await asyncio.sleep(takes)
                    await request.answer(Done())
                case Push():
                    await asyncio.sleep(takes)
                    pushed.append((request.body.number, request.body.shard, request.body.version))
                    await request.answer(Done())

        address = await other.listen(f"ipc://{tmp_path}/other.sock", answer)
        server = Member(id=other.instance_id, name="server-0", role="server", address=address)
        here = Member(id=worker.instance_id, name="worker-0", role="worker")
        chain = Chain(primary=server.id)
        view = View(epoch=3, servers=(server,), workers=(here,), chains=(chain, chain))

        def introduce(view):
            return Join(name="worker-0", role="worker", address="", model={}, view=view)

        contact = Contact(worker, find=lambda: Center(epoch=3, address=address, name="center-0"), introduce=introduce)
        contact.start()
        try:
            assert await contact.newer_than(0, 30.0)
            assert worker.members == {worker.instance_id, other.instance_id}
            client = Client(
                worker,
                contact,
                weights=torch.zeros(numel),
                spans=[slice(0, half), slice(half, numel)],
                deadline_seconds=deadline_seconds,
                attempt_seconds=attempt_seconds,
            )
            await use(client)
        finally:
            await contact.stop()
            await worker.close()
            await other.close()

    asyncio.run(run())
    return pushed
