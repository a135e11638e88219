"""What the cleaner throws away: only what those left behind who are in no view any more."""

import asyncio

from shoal.comm.wire.node import Node, new_incarnation
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.cleaner import Cleaner
from shoal.paramserver.messages import OPERATIONS


def view(epoch, *members):
    servers = tuple(member for member in members if member.role == "server")
    workers = tuple(member for member in members if member.role == "worker")
    return View(epoch=epoch, servers=servers, workers=workers, chains=(Chain(primary=servers[0].id),))


def test_sockets_of_departed_members_go_and_those_of_others_stay(tmp_path):
    ids = [new_incarnation() for _ in range(3)]
    server = Member(id=ids[0], name="server-0", role="server", address=f"ipc://{tmp_path}/server-0-{ids[0]}.sock")
    worker = Member(id=ids[1], name="worker-0", role="worker")
    other = Member(id=ids[2], name="worker-1", role="worker")
    for member in (server, worker, other):
        (tmp_path / f"{member.name}-{member.id}.sock").touch()

    async def run():
        node = Node(incarnation=new_incarnation(), operations=OPERATIONS)
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
