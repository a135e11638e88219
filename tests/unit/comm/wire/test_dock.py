"""Who may connect a lane, and what becomes of a payload where none can be had."""

import asyncio
import socket

import msgspec
import pytest

from shoal.comm.wire import caller_lane, dock, listener
from shoal.comm.wire.operations import LaneAsked
from support.wire.bulk_streams import converse, echo, ends, lane_of, lanes_of, plain_lane
from support.wire.operations import DEADLINE, nodes, until


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
