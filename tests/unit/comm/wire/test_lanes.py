"""Long payloads beside ZeroMQ: what is wrong with bytes, and calls that end while theirs are under way."""

import asyncio
import random
import socket
import struct

import numpy as np
import pytest

from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.counters import DROPPED
from shoal.comm.wire.errors import Refused, WireLost, WireTimeout
from shoal.comm.wire.keys import load_keys, make_keys
from shoal.comm.wire.message import pack_chunk
from shoal.comm.wire.operations import LaneAsked
from support.wire.bulk_streams import (
    SIZE,
    TCP,
    Deaf,
    chunks,
    converse,
    echo,
    ends,
    lane_of,
    lanes_of,
    message,
    plain_lane,
)
from support.wire.operations import DEADLINE, Echo, Echoed, answer, nodes, noise, until


def test_long_payloads_cross_beside_the_messages_both_ways():
    async def work(server, client, peer):
        await echo(peer)
        lane = lane_of(peer)
        assert lane is not None and len(lanes_of(server)) == 1
        for number in range(4):
            await echo(peer, number, into=np.zeros(SIZE, np.uint8) if number % 2 else None)
        assert lane_of(peer) is lane
        counters = server.counters
        assert counters["received"] == counters["accepted"] and counters.dropped == 0 == client.counters.dropped

    converse(work)


def test_who_only_pulls_has_a_lane_after_the_first_answer():
    data = noise(SIZE)

    async def handler(request):
        await request.answer(Echoed(1), payload=data)

    async def work(server, client, peer):
        into = np.zeros(SIZE, np.uint8)
        await peer.call(Echo(1), deadline=DEADLINE, into=into)
        await until(lambda: len(lanes_of(server)) == 1)
        num_received = client.counters["received"]
        into[:] = 0
        await peer.call(Echo(1), deadline=DEADLINE, into=into)
        assert np.array_equal(into, data)
        assert client.counters["received"] == num_received + 1 + 4  # a message and its chunks

    converse(work, handler)


def test_with_keys_there_is_no_lane(tmp_path):
    make_keys(tmp_path / "key")

    async def conversation():
        async with nodes(2, keys=load_keys(tmp_path / "key")) as (server, client):
            peer = client.connect(await server.listen(TCP, answer))
            await echo(peer)
            assert peer._lane is None and not lanes_of(server)
            with pytest.raises(Refused, match="do not cross beside"):
                await peer.call(LaneAsked(), deadline=DEADLINE)

    asyncio.run(conversation())


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_flipped_bit_costs_its_payload_and_not_the_lane(chunk):
    async def work(server, client, peer):
        loop = asyncio.get_running_loop()
        connection = await plain_lane(peer)
        data = noise(SIZE).tobytes()
        damaged = chunks(data)
        damaged[chunk] = damaged[chunk][:-1] + bytes([damaged[chunk][-1] ^ 4])
        before = server.counters["accepted"]
        await loop.sock_sendall(connection, message(1) + b"".join(damaged))
        await until(lambda: server.counters["incomplete"] == 1)
        assert server.counters["corrupt"] == 1 and server.counters["accepted"] == before + chunk
        await loop.sock_sendall(connection, message(2) + b"".join(chunks(data)))
        await until(lambda: server.counters["accepted"] == before + chunk + 5)
        connection.close()

    converse(work)


def test_a_chunk_in_the_place_of_another_is_seen():
    async def work(server, client, peer):
        connection = await plain_lane(peer)
        parts = chunks(noise(SIZE).tobytes())
        await asyncio.get_running_loop().sock_sendall(
            connection, message(1) + parts[1] + parts[0] + parts[2] + parts[3]
        )
        await until(lambda: server.counters["corrupt"] == 1 and server.counters["incomplete"] == 1)
        connection.close()

    converse(work)


@pytest.mark.parametrize(
    "lengths",
    [(4096, 10, SIZE), (100, 2**31, SIZE), (100, 10, 2**60), (100, 10, 5), (2**32 - 1, 2**32 - 1, 2**64 - 1)],
)
def test_lengths_that_no_message_has_end_the_lane(lengths):
    async def work(server, client, peer):
        connection = await plain_lane(peer)
        await asyncio.get_running_loop().sock_sendall(connection, struct.pack("<IIQ", *lengths) + b"x" * 5000)
        assert await ends(connection)
        assert server.counters["frames"] == 1 and not lanes_of(server)
        await echo(peer)

    converse(work)


def test_a_payload_that_is_not_wanted_is_passed_over():
    """Refused for its own reason; what comes after it on the lane is taken."""

    async def work(server, client, peer):
        loop = asyncio.get_running_loop()
        server.epoch = 3
        client.epoch = 3
        connection = await plain_lane(peer)
        data = chunks(noise(SIZE).tobytes())
        for sequence, fields, reason in (
            (1, {"epoch": 2}, "stale"),
            (2, {"epoch": 3, "operation": "late"}, "oversized"),
            (3, {"epoch": 3, "version": 9}, "version"),
            (4, {"epoch": 3, "shape": (SIZE + 1,)}, "payload"),
            (5, {"epoch": 3, "dtype": "", "shape": ()}, "payload"),
        ):
            before = server.counters[reason]
            await loop.sock_sendall(connection, message(sequence, **fields) + b"".join(data))
            await until(lambda reason=reason, before=before: server.counters[reason] == before + 1)
        before = server.counters["accepted"]
        await loop.sock_sendall(connection, message(6, epoch=3) + b"".join(data))
        await until(lambda: server.counters["accepted"] == before + 5)
        await loop.sock_sendall(connection, message(6, epoch=3) + b"".join(data))
        await until(lambda: server.counters["duplicate"] == 1)
        assert server.counters["received"] == server.counters["accepted"] + server.counters.dropped
        connection.close()

    converse(work)


def test_a_lane_that_breaks_in_a_payload_costs_that_payload():
    async def work(server, client, peer):
        connection = await plain_lane(peer)
        await asyncio.get_running_loop().sock_sendall(connection, message(1) + chunks(noise(SIZE).tobytes())[0])
        await until(lambda: server.counters["received"] >= 3)
        connection.close()
        await until(lambda: server.counters["incomplete"] == 1)
        await until(lambda: not lanes_of(server))

    converse(work)


def test_a_call_whose_lane_breaks_ends_at_once_and_the_next_one_has_another():
    async def work(server, client, peer):
        await echo(peer)
        [lane], mine = lanes_of(server).values(), lane_of(peer)
        Deaf(lane)
        waiting = asyncio.ensure_future(peer.call(Echo(1), payload=noise(40 << 20), deadline=60))
        await until(lambda: mine._parcels)
        lane.close()
        with pytest.raises(WireLost, match="echo"):
            await waiting
        await echo(peer, 2)
        assert lane_of(peer) is not mine and len(lanes_of(server)) == 1

    converse(work)


def test_a_call_whose_payload_was_sent_ends_with_its_lane():
    """All of it was in the kernel's hands when the lane ended; nobody will answer."""
    parked = []

    async def handler(request):
        if request.body.number:
            await answer(request)
        else:
            parked.append(request)

    async def work(server, client, peer):
        await echo(peer)
        waiting = asyncio.ensure_future(peer.call(Echo(0), payload=noise(SIZE), deadline=60))
        await until(lambda: parked)
        [lane] = lanes_of(server).values()
        lane.close()
        with pytest.raises(WireLost, match="echo"):
            await waiting
        await echo(peer, 2)

    converse(work, handler)


def test_chunks_by_two_ways_do_not_make_a_payload():
    """One of them by ZeroMQ, where another is due on the lane: the end of the payload would be what lay there before."""

    async def work(server, client, peer):
        loop = asyncio.get_running_loop()
        data = noise(2 * CHUNK_BYTES).tobytes()
        connection = await plain_lane(peer)
        await loop.sock_sendall(connection, message(1, num_bytes=len(data)))
        await until(lambda: len(server._listeners[0]._streams) == 1)
        await peer._pump.send(pack_chunk(1, 0, memoryview(data)[:CHUNK_BYTES]))
        [stream] = server._listeners[0]._streams._streams.values()
        await until(lambda: stream.num_arrived)
        before = server.counters["accepted"]
        await loop.sock_sendall(connection, b"".join(chunks(data)))
        await until(lambda: server.counters["corrupt"] == 1 and server.counters["incomplete"] == 1)
        assert server.counters["accepted"] == before
        connection.close()

    converse(work)


def test_a_call_that_ends_early_leaves_the_lane_in_order():
    """The rest of its payload is not sent, and says so."""

    async def work(server, client, peer):
        await echo(peer)
        lane, [theirs] = lane_of(peer), lanes_of(server).values()
        deaf = Deaf(theirs)
        begun = asyncio.ensure_future(peer.call(Echo(0), payload=noise(40 << 20), deadline=60))
        await until(lambda: lane._parcels)
        await asyncio.sleep(0)  # It begins to write in the next turn.
        for number in range(2):
            with pytest.raises(WireTimeout, match="echo"):
                await peer.call(Echo(number), payload=noise(40 << 20, number), deadline=0.05)
        begun.cancel()
        await until(lambda: len(lane._parcels) == 1)
        deaf.hears.set()
        await echo(peer, 2)
        assert lane_of(peer) is lane
        assert server.counters["incomplete"] == 1  # the other two were not begun

    converse(work)


def test_nothing_is_written_to_the_memory_of_a_call_that_has_ended():
    data = noise(64 << 20)

    async def handler(request):
        await request.answer(Echoed(1), payload=data if request.body.number else None)

    async def work(server, client, peer):
        await echo_small(peer)
        into = np.zeros(data.size, np.uint8)
        lane = None
        while lane is None:
            await peer.call(Echo(1), deadline=DEADLINE, into=into)
            lane = lane_of(peer)
        into[:] = 0
        waiting = asyncio.ensure_future(peer.call(Echo(1), deadline=DEADLINE, into=into))
        await until(lambda: lane._arriving is not None and lane._arriving.num_arrived)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        into[:] = 7
        await until(lambda: lane._arriving is None)
        assert (into == 7).all() and lane_of(peer) is lane
        await peer.call(Echo(1), deadline=DEADLINE, into=into)
        assert np.array_equal(into, data)

    async def echo_small(peer):
        await peer.call(Echo(0), deadline=DEADLINE)

    converse(work, handler)


@pytest.mark.parametrize("seed", range(4))
def test_noise_on_lanes_beside_valid_payloads(seed):
    """Damaged, cut and random bytes behind a right word: none accepted, everything counted, nobody else disturbed."""
    source = random.Random(seed)
    data = chunks(noise(SIZE).tobytes())

    async def work(server, client, peer):
        async with nodes(1) as [other]:
            stranger = other.connect(peer.address)
            for number in range(25):
                whole = bytearray(message(number) + b"".join(data))
                kind = source.choice(["noise", "head", "cut", "none"])
                if kind == "noise":
                    whole = bytearray(source.randbytes(source.randint(1, 5000)))
                elif kind == "head":
                    for _ in range(source.randint(1, 5)):
                        whole[source.randrange(150)] ^= 1 << source.randrange(8)
                elif kind == "cut":
                    whole = whole[: source.randrange(len(whole))]
                connection = await plain_lane(stranger)
                try:
                    await asyncio.get_running_loop().sock_sendall(connection, whole)
                except ConnectionError:
                    pass  # It has hung up already.
                connection.shutdown(socket.SHUT_WR) if kind != "noise" else None
                connection.close()
                await echo(peer, number)
            counters = server.counters
            await until(lambda: not server._listeners[0]._streams and len(lanes_of(server)) == 1)
            await until(
                lambda: counters["received"] == counters["accepted"] + sum(counters[reason] for reason in DROPPED)
            )

    converse(work)
