"""Keys on the wire: those on the list talk, a stranger gets no answer, and nothing is readable on the way."""

import asyncio
import contextlib
import socket

import pytest

from shoal.comm.wire.errors import WireTimeout
from shoal.comm.wire.keys import load_keys, make_keys, read_public_keys
from shoal.core.errors import RequestError
from support.wire.operations import DEADLINE, Echo, Late, answer, make_node, nodes, noise, raw_dealer

SILENT_SECONDS = 0.4


def test_one_key_file_for_all_is_enough(tmp_path):
    make_keys(tmp_path / "key")

    async def work():
        async with nodes(2, keys=load_keys(tmp_path / "key")) as (server, client):
            address = await server.listen("tcp://127.0.0.1:0", answer)
            endpoint, _, public = address.partition("#")
            assert public == (tmp_path / "key.pub").read_text().strip()
            for target in (address, endpoint):
                found = await client.connect(target).call(Echo(1), payload=noise(3 << 20), deadline=DEADLINE)
                assert bytes(found.payload) == noise(3 << 20).tobytes()

    asyncio.run(work())


def test_who_asked_for_encryption_gets_it_on_one_machine_too(tmp_path):
    tmp_path.chmod(0o700)
    keys = make_keys(tmp_path / "key")

    async def work():
        async with nodes(2, keys=keys, arena_dir=tmp_path) as (server, client):
            peer = client.connect(await server.listen("tcp://127.0.0.1:0", answer))
            for _ in range(3):
                await peer.call(Echo(1), payload=noise(300_000), deadline=DEADLINE)
            assert not list(tmp_path.glob("*.arena"))

    asyncio.run(work())


def test_the_list_is_the_membership_and_is_read_anew(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for name in ("server", "member", "stranger"):
        make_keys(tmp_path / name)
    (tmp_path / "member.pub").rename(allowed / "member.pub")
    server_keys = load_keys(tmp_path / "server", allowed=allowed)

    async def work():
        server = make_node(keys=server_keys)
        member, stranger = (
            make_node(keys=load_keys(tmp_path / "member")),
            make_node(keys=load_keys(tmp_path / "stranger")),
        )
        try:
            address = await server.listen("tcp://127.0.0.1:0", answer)
            await member.connect(address).call(Late(), deadline=DEADLINE)
            with pytest.raises(WireTimeout, match="refused this process's key"):
                await stranger.connect(address).call(Late(), deadline=SILENT_SECONDS)
            assert server.counters["received"] == 1
            (tmp_path / "stranger.pub").rename(allowed / "stranger.pub")
            await stranger.connect(address.replace("127.0.0.1", "127.0.0.2")).close()
            newcomer = make_node(keys=load_keys(tmp_path / "stranger"))
            await newcomer.connect(address).call(Late(), deadline=DEADLINE)
            await newcomer.close()
            # A list that cannot be read lets nobody in.
            (allowed / "broken.pub").write_text("no key")
            late = make_node(keys=load_keys(tmp_path / "member"))
            with pytest.raises(WireTimeout):
                await late.connect(address).call(Late(), deadline=SILENT_SECONDS)
            await late.close()
        finally:
            for node in (server, member, stranger):
                await node.close()

    asyncio.run(work())


def test_strangers_get_no_answer(tmp_path):
    """Without a key, with the wrong key of the server, and with bytes of no protocol at all."""
    keys = make_keys(tmp_path / "key")
    other = make_keys(tmp_path / "other")

    async def work():
        async with nodes(1, keys=keys) as [server], nodes(1) as [bare], nodes(1, keys=keys) as [lost]:
            address = await server.listen("tcp://127.0.0.1:0", answer)
            endpoint = address.partition("#")[0]
            for node, target in ((bare, endpoint), (lost, f"{endpoint}#{other.public_hex}")):
                with pytest.raises(WireTimeout):
                    await node.connect(target).call(Late(), deadline=SILENT_SECONDS)
            async with raw_dealer(endpoint) as dealer:
                dealer.send_multipart([b"hello"])
                assert dealer.poll(100) == 0
            host, _, port = endpoint.removeprefix("tcp://").partition(":")
            with socket.create_connection((host, int(port)), timeout=2) as plain:
                plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
                # At most the greeting of the transport, which says what protocol is spoken there and nothing else.
                with contextlib.suppress(ConnectionResetError):
                    assert b"echo" not in plain.recv(64)
            assert server.counters["received"] == 0

    asyncio.run(work())


def test_nothing_is_readable_on_the_way(tmp_path):
    """A proxy in the middle sees neither the body nor the payload."""
    keys = make_keys(tmp_path / "key")
    secret = b"a gradient that nobody else may see " * 40
    seen = bytearray()

    async def work(keys):
        seen.clear()
        async with nodes(2, keys=keys) as (server, client):
            endpoint = (await server.listen("tcp://127.0.0.1:0", answer)).partition("#")[0]
            port = int(endpoint.rpartition(":")[2])

            async def pipe(reader, writer):
                while data := await reader.read(65536):
                    seen.extend(data)
                    writer.write(data)
                writer.close()

            async def relay(reader, writer):
                onward = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(pipe(reader, onward[1]), pipe(onward[0], writer))

            proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
            port_of_proxy = proxy.sockets[0].getsockname()[1]
            found = await client.connect(f"tcp://127.0.0.1:{port_of_proxy}").call(
                Echo(1), payload=secret, deadline=DEADLINE
            )
            assert bytes(found.payload) == secret
            await client.close()
            proxy.close()
            await proxy.wait_closed()
            await asyncio.sleep(0.01)

    asyncio.run(work(None))
    assert secret in seen
    asyncio.run(work(keys))
    assert b"gradient" not in seen and len(seen) > 2 * len(secret)


def test_lists_of_public_keys(tmp_path):
    keys = [make_keys(tmp_path / name) for name in "ab"]
    file = tmp_path / "list"
    file.write_text(f"# members\n{keys[0].public_hex}\n\n{keys[1].public_hex}  # the second\n")
    assert read_public_keys(file) == read_public_keys(tmp_path) == {key.public for key in keys}
    file.write_text(f"{keys[0].public_hex}\nabc\n")
    with pytest.raises(RequestError, match="line 2"):
        read_public_keys(file)
    with pytest.raises(RequestError):
        load_keys(tmp_path / "a", allowed=tmp_path / "missing")
    assert keys[0].secret.hex() not in repr(keys[0])
