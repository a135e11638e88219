"""A pull that broke off half way left a mixture of two versions behind, and the next server said that nothing was new.

A worker had version 10 of a shard and pulled. The server answered with version 12 and died in the middle of it. Its backup, which
had not applied updates 10 and 11 yet, took over; it was told that the worker had version 10, had none newer, and sent nothing. So
the worker computed with weights that were version 12 in front and version 10 behind, and called them version 10.
"""

import asyncio
import contextlib

import torch
import zmq

from shoal.comm.wire.message import PROTOCOL_VERSION, Header, pack, pack_chunk, unpack
from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.view import Chain, Member, View
from shoal.paramserver.contact import Contact
from shoal.paramserver.messages import OPERATIONS, Join, Pulled
from shoal.paramserver.worker.client import Client

NUMEL = 1 << 20
"""4 MB: several chunks."""


def view_of(epoch, primary, address):
    server = Member(id=primary, name=primary, role="server", address=address)
    return View(epoch=epoch, servers=(server,), workers=(), chains=(Chain(primary=primary),))


async def answer_half(socket, weights):
    """A server that dies after the first chunk of its answer: it is spoken for frame by frame."""
    route, *frames = await asyncio.to_thread(socket.recv_multipart)
    asked = unpack([memoryview(frame) for frame in frames]).header
    header = Header(
        version=PROTOCOL_VERSION,
        epoch=1,
        sender="a",
        sequence=0,
        operation="pull",
        answers=asked.sequence,
        key="",
        dtype="float32",
        shape=(NUMEL,),
        deadline=0.0,
        place=None,
        folder="",
    )
    payload = memoryview(weights.numpy()).cast("B")
    socket.send_multipart([route, *pack(header, OPERATIONS.encode(Pulled(version=12)), payload)])
    socket.send_multipart([route, *pack_chunk(0, 0, payload[: 1 << 20])])


async def pull_through_a_death(folder):
    context = zmq.Context()
    dying = context.socket(zmq.ROUTER)
    dying.setsockopt(zmq.LINGER, 0)
    dying.setsockopt(zmq.RCVTIMEO, 20_000)
    dying.bind(f"ipc://{folder}/a.sock")
    version_10, version_12 = torch.full((NUMEL,), 10.0), torch.full((NUMEL,), 12.0)

    async def serve_backup(request):
        if request.body.have >= 10:
            await request.answer(Pulled(version=10, is_new=False))
        else:
            await request.answer(Pulled(version=10), payload=version_10)

    backup, node = (Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(2))
    await backup.listen(f"ipc://{folder}/b.sock", serve_backup)
    contact = Contact(
        node, find=lambda: None, introduce=lambda view: Join(name="w", role="worker", address="", model={}, view=view)
    )
    contact.view = view_of(1, "a", f"ipc://{folder}/a.sock")
    weights = version_10.clone()
    client = Client(node, contact, weights=weights, spans=[slice(0, NUMEL)], deadline_seconds=30.0)
    client.versions = [10]
    try:
        async with asyncio.timeout(30.0):
            pulling = asyncio.ensure_future(client.pull(0))
            await answer_half(dying, version_12)
            while weights[0] != 12.0:
                await asyncio.sleep(0.001)
            contact.view = view_of(2, "b", f"ipc://{folder}/b.sock")
            dying.close()
            return await pulling, weights
    finally:
        with contextlib.suppress(zmq.ZMQError):
            dying.close()
        await node.close()
        await backup.close()
        context.term()


def test_what_a_broken_pull_left_behind_is_pulled_again(tmp_path):
    read, weights = asyncio.run(pull_through_a_death(tmp_path))
    assert read == (10,)
    assert torch.equal(weights, torch.full((NUMEL,), 10.0)), "weights of two versions are taken for one"
