"""What the cleaner throws away: only what those left behind who are in no view any more."""

import asyncio

import torch

from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.cleaner import Cleaner
from shoal.paramserver.messages import OPERATIONS
from support.paramserver.job_in_process import quicken, running_job


def view(epoch, *members):
    servers = tuple(member for member in members if member.role == "server")
    workers = tuple(member for member in members if member.role == "worker")
    return View(epoch=epoch, servers=servers, workers=workers, chains=(Chain(primary=servers[0].id),))


def test_sockets_of_departed_members_go_and_those_of_others_stay(tmp_path):
    ids = [new_instance_id() for _ in range(3)]
    server = Member(id=ids[0], name="server-0", role="server", address=f"ipc://{tmp_path}/server-0-{ids[0]}.sock")
    worker = Member(id=ids[1], name="worker-0", role="worker")
    other = Member(id=ids[2], name="worker-1", role="worker")
    for member in (server, worker, other):
        (tmp_path / f"{member.name}-{member.id}.sock").touch()

    async def run():
        node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
        cleaner = Cleaner(node, folder=tmp_path)
        await cleaner.take_view(view(1, server, worker, other))
        assert not cleaner.collected and len(list(tmp_path.iterdir())) == 3
        await cleaner.take_view(view(2, server, other))
        await node.close()
        return cleaner.collected

    collected = asyncio.run(run())
    assert collected == {"worker": 1, "socket": 1, "arena": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"server-0-{ids[0]}.sock", f"worker-1-{ids[2]}.sock"]
    )


def test_of_a_dead_worker_and_a_dead_server_nothing_is_left(tmp_path_factory, monkeypatch):
    """Its clock, its work units, its gradients, its window of duplicates, its socket and its shards' copies."""
    quicken(monkeypatch)

    async def run():
        async with running_job(tmp_path_factory.mktemp("c"), update="async", steps=10_000, shares=2, servers=3) as job:
            await job.until_update(3)
            worker = job.members["worker-0"].node.instance_id
            dead = {worker, job.members["server-2"].node.instance_id}
            client = job.members["worker-0"].client
            for task in job.members["worker-0"].tasks:
                task.cancel()
            await client.push(torch.ones_like(client._weights), read=(0,) * len(client.versions))
            assert any(worker in {one.worker for one in stored(server)} for server in job.servers())
            await job.kill("worker-0")
            await job.kill("server-2")

            def left():
                leader = next(server.log_leader for server in job.servers() if server.log_leader is not None)
                yield from dead & set(leader.command_log.update_log.members)
                yield from dead & set(leader._followed)
                for server in job.servers():
                    yield from dead & server.node.deduplication._seen.keys()
                    yield from (one for one in stored(server) if one.worker in dead)
                    yield from (shard for shard in server.replicas if server.identity not in replicas_of(job, shard))
                yield from (path.name for path in job.folder.glob("*.sock") if path.stem.rpartition("-")[2] in dead)

            async with asyncio.timeout(60):
                while found := list(left()):
                    job.check()
                    await asyncio.sleep(0.05)
            assert not found

    asyncio.run(run())


def stored(server):
    """The pushes that wait for their update at a server."""
    ready = [replica for replica in server.replicas.values() if replica.ready.is_set()]
    return [identity for replica in ready for identity in replica.state._gradients.stored]


def replicas_of(job, shard):
    return job.view().chains[shard].replicas
