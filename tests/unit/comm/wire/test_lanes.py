"""Long payloads beside ZeroMQ: who may connect, what is wrong with bytes, and calls that end while theirs are under way."""

import asyncio
import random
import socket
import struct

import msgspec
import numpy as np
import pytest
import xxhash

from shoal.comm.wire import caller_lane, dock, listener
from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.counters import DROPPED
from shoal.comm.wire.errors import Refused, WireLost, WireTimeout
from shoal.comm.wire.header import PROTOCOL_VERSION, Header
from shoal.comm.wire.keys import load_keys, make_keys
from shoal.comm.wire.message import pack, pack_chunk
from shoal.comm.wire.operations import LaneAsked
from wire_cases import DEADLINE, OPERATIONS, Echo, Echoed, answer, nodes, noise, until

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


def test_a_stranger_at_the_dock_is_sent_away(monkeypatch):
    monkeypatch.setattr(dock, "_WORD_SECONDS", 0.2)

    async def work(server, client, peer):
        offer = (await peer.call(LaneAsked(), deadline=DEADLINE)).body
        for said in (b"x" * 16, b"GET / HTTP/1.0\r\n\r\n", b"half", b""):
            stranger = socket.create_connection(("127.0.0.1", offer.port))
            stranger.sendall(said)
            stranger.setblocking(False)
            assert await ends(stranger)
        assert not lanes_of(server)
        await echo(peer)

    converse(work)


def test_a_word_is_good_once_and_for_a_while(monkeypatch):
    async def work(server, client, peer):
        offer = (await peer.call(LaneAsked(), deadline=DEADLINE)).body
        for is_first in (True, False):
            connection = socket.create_connection(("127.0.0.1", offer.port))
            connection.sendall(offer.word)
            connection.setblocking(False)
            if is_first:
                await until(lambda: lanes_of(server))
                first = connection
            else:
                assert await ends(connection)
        assert first.recv(99) == offer.reply
        first.close()
        monkeypatch.setattr(dock, "_WORD_SECONDS", -1.0)
        assert await ends(await plain_lane(peer))

    converse(work)


def test_silent_strangers_are_few(monkeypatch):
    monkeypatch.setattr(dock, "_MAX_SILENT", 3)
    monkeypatch.setattr(caller_lane, "_AGAIN_SECONDS", 0.0)

    async def work(server, client, peer):
        offer = (await peer.call(LaneAsked(), deadline=DEADLINE)).body
        silent = [socket.create_connection(("127.0.0.1", offer.port)) for _ in range(3)]
        await until(lambda: server._listeners[0]._dock._num_silent == 3)
        one_more = socket.create_connection(("127.0.0.1", offer.port))
        one_more.setblocking(False)
        assert await ends(one_more)
        # There is no room for a lane, and the payload goes with the messages.
        await echo(peer)
        assert lane_of(peer) is None and not lanes_of(server)
        for connection in silent:
            connection.close()
        await until(lambda: server._listeners[0]._dock._num_silent == 0)
        await echo(peer)
        assert lane_of(peer) is not None

    converse(work)


def test_another_program_on_the_port_gets_no_payload(monkeypatch):
    """Where the address is the near end of a tunnel, the port that was told is one of another machine."""
    heard = []
    monkeypatch.setattr(caller_lane, "_AGAIN_SECONDS", 0.0)

    async def pretend(reader, writer):
        heard.append(await reader.read(64))
        writer.write(b"x" * 16)
        heard.append(await reader.read(64))
        writer.close()

    async def work(server, client, peer):
        other = await asyncio.start_server(pretend, "127.0.0.1", 0)
        real = dock.Dock.offer

        def offer(self, route):
            return msgspec.structs.replace(real(self, route), port=other.sockets[0].getsockname()[1])

        monkeypatch.setattr(dock.Dock, "offer", offer)
        await echo(peer)
        await until(lambda: len(heard) == 4)  # for the payload, and after an answer that had one
        assert lane_of(peer) is None and [len(part) for part in heard[::2]] == [16, 16] and not any(heard[1::2])
        other.close()
        await other.wait_closed()

    converse(work)


def test_a_port_that_accepts_and_says_nothing_costs_a_moment_once(monkeypatch):
    """It cost every call its whole deadline: the lane's time was as long as the call's own."""
    monkeypatch.setattr(caller_lane, "_OPEN_SECONDS", 0.1)

    async def work(server, client, peer):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            real = dock.Dock.offer

            def offer(self, route):
                return msgspec.structs.replace(real(self, route), port=silent.getsockname()[1])

            monkeypatch.setattr(dock.Dock, "offer", offer)
            for number in range(3):
                await echo(peer, number)
            assert lane_of(peer) is None and not lanes_of(server)
            silent.accept()[0].close()
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.accept()  # Nobody came a second time.

    converse(work)


def test_where_there_are_lanes_enough_payloads_go_with_the_messages(monkeypatch):
    monkeypatch.setattr(listener, "_MAX_LANES", 1)

    async def work(server, client, peer):
        await echo(peer)
        async with nodes(1) as [other]:
            second = other.connect(peer.address)
            await echo(second)
            assert lane_of(second) is None and len(lanes_of(server)) == 1

    converse(work)


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
    parked = []

    async def handler(request):
        if request.body.number:
            await answer(request)
        else:
            parked.append(request)

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

    converse(work, handler)


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
