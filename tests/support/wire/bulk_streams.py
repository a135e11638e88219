"""Lanes in the hands of a test: conversations that use them, plain ones, and the bytes that cross them."""

import asyncio
import socket
import struct

import numpy as np
import xxhash

from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.header import PROTOCOL_VERSION, Header
from shoal.comm.wire.message import pack
from shoal.comm.wire.operations import LaneAsked
from support.wire.operations import DEADLINE, OPERATIONS, Echo, answer, nodes, noise

SIZE = 3 * CHUNK_BYTES + 5
TCP = "tcp://127.0.0.1:0"


def converse(work, handler=answer):
    """A server with lanes and a client that has called it once."""

    async def conversation():
        async with nodes(2) as (server, client):
            peer = client.connect(await server.listen(TCP, handler))
            await work(server, client, peer)

    asyncio.run(conversation())


def lane_of(peer):
    return peer._lane._lane


def lanes_of(server):
    [listener] = server._listeners
    return listener._lanes


async def echo(peer, number=1, **options):
    sent = noise(SIZE, number)
    found = await peer.call(Echo(number), payload=sent, deadline=DEADLINE, **options)
    assert found.body.number == number and np.array_equal(np.frombuffer(found.payload, np.uint8), sent)


async def plain_lane(peer) -> socket.socket:
    """A lane in the hands of a test, connected in the name of ``peer``."""
    offer = (await peer.call(LaneAsked(), deadline=DEADLINE)).body
    connection = socket.create_connection(("127.0.0.1", offer.port))
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(connection, offer.word)
    async with asyncio.timeout(DEADLINE):
        assert await asyncio.get_running_loop().sock_recv(connection, 16) in (offer.reply, b"")
    return connection


class Deaf:
    """A lane that does not read any more, until it does: what is sent to it fills the connection."""

    def __init__(self, lane) -> None:
        self.lane, self.hears = lane, asyncio.Event()
        self.receive, lane._receive = lane._receive, self.wait

    async def wait(self, memory):
        await self.hears.wait()
        return await self.receive(memory)


async def ends(connection) -> bool:
    """True when the other side closes, whatever it sends before."""
    loop = asyncio.get_running_loop()
    with connection:
        async with asyncio.timeout(DEADLINE):
            try:
                while await loop.sock_recv(connection, 1 << 16):
                    pass
            except ConnectionError:
                pass
            return True


def message(sequence, num_bytes=SIZE, **fields) -> bytes:
    """The head and the frames of a request for an echo, rightly sealed."""
    values = {"version": PROTOCOL_VERSION, "epoch": 0, "sender": "f" * 16, "sequence": sequence, "operation": "echo"}
    values |= {"answers": -1, "key": "", "dtype": "uint8", "shape": (num_bytes,), "deadline": 5.0, "place": None}
    header = Header(**(values | {"folder": ""} | fields))
    frames = pack(header, OPERATIONS.encode(Echo(1)), None)
    return struct.pack("<IIQ", len(frames[0]), len(frames[1]), num_bytes) + b"".join(frames)


def chunks(data: bytes) -> list[bytes]:
    parts = [(at, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return [struct.pack("<I8s", len(part), xxhash.xxh3_64_digest(part, seed=at)) + part for at, part in parts]
