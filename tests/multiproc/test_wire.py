"""Nodes in processes of their own: one that dies, one that is stopped, and the one that comes after it."""

import asyncio
import signal
import time

import numpy as np
import psutil
import pytest

from shoal.comm.wire.arena import sweep_arenas
from shoal.comm.wire.errors import Refused, WireLost, WireTimeout
from support.wire.node_process import server
from support.wire.operations import DEADLINE, Count, Echo, Late, Sum, nodes, noise

SIZE = 3 << 20


@pytest.fixture(params=["ipc", "tcp", "arena"])
def address(request, tmp_path):
    tmp_path.chmod(0o700)
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/s.sock"


@pytest.fixture
def arenas(request, address, tmp_path):
    return tmp_path if "arena" in request.node.name else None


def test_a_killed_server_is_noticed_and_its_successor_reached(address, arenas):
    async def work():
        async with nodes(1, arena_dir=arenas) as [client]:
            with server(address, arenas=arenas) as (first, bound):
                peer = client.connect(bound)
                for _ in range(3):
                    await peer.call(Echo(1), payload=noise(SIZE), deadline=DEADLINE)
                waiting = asyncio.ensure_future(peer.call(Echo(2, seconds=60), payload=noise(SIZE), deadline=60))
                while (await peer.call(Count(), deadline=DEADLINE)).body.counts["accepted"] < 5:
                    pass
                first.kill()
                started = time.monotonic()
                with pytest.raises(WireLost, match="echo") as caught:
                    await waiting
                assert time.monotonic() - started < 5 and bound in str(caught.value)
                first.wait()
                # Of a broken connection some hear twice, and the second time it may be this call that waits.
                with pytest.raises(WireTimeout, match=r"late within 0\.2 s|broke while late waited"):
                    await peer.call(Late(), deadline=0.2)
                # A call that begins while nobody is there reaches the one who comes.
                early = asyncio.ensure_future(peer.call(Echo(3), payload=noise(SIZE), deadline=DEADLINE, attempts=2))
                await asyncio.sleep(0)
                with server(bound, arenas=arenas) as (_, again):
                    assert again == bound
                    assert bytes((await early).payload) == noise(SIZE).tobytes()
                    for _ in range(3):
                        found = await peer.call(Echo(4), payload=noise(SIZE, 4), deadline=DEADLINE)
                        assert bytes(found.payload) == noise(SIZE, 4).tobytes()

    asyncio.run(work())
    if arenas is not None:
        # The client has tidied up after itself; the two that were killed could not.
        left = sorted(path.name for path in arenas.glob("*.arena"))
        assert left and sweep_arenas(arenas) == left and not list(arenas.glob("*.arena"))


def test_a_stopped_server_costs_the_deadline_and_then_goes_on(address, arenas):
    async def work():
        async with nodes(1, arena_dir=arenas) as [client]:
            with server(address, arenas=arenas) as (process, bound):
                peer = client.connect(bound)
                for _ in range(2):
                    await peer.call(Echo(1), payload=noise(SIZE), deadline=DEADLINE)
                process.send_signal(signal.SIGSTOP)
                try:
                    for number in range(3):
                        with pytest.raises(WireTimeout, match=bound):
                            await peer.call(Echo(2), payload=noise(SIZE, number), deadline=0.1)
                finally:
                    process.send_signal(signal.SIGCONT)
                found = await peer.call(Echo(3), payload=noise(SIZE, 9), deadline=DEADLINE)
                assert found.body.number == 3 and bytes(found.payload) == noise(SIZE, 9).tobytes()

    asyncio.run(work())


def test_what_a_killed_server_sent_stays_readable_and_is_swept(tmp_path):
    tmp_path.chmod(0o700)

    async def work():
        async with nodes(1, arena_dir=tmp_path) as [client]:
            with server(f"ipc://{tmp_path}/s.sock", arenas=tmp_path) as (process, bound):
                kept = [
                    (await client.connect(bound).call(Echo(1), payload=noise(SIZE), deadline=DEADLINE)).payload
                    for _ in range(3)
                ]
                process.kill()
                process.wait()
                assert len(sweep_arenas(tmp_path)) == 3
                assert all(bytes(payload) == noise(SIZE).tobytes() for payload in kept)

    asyncio.run(work())
    assert not list(tmp_path.glob("*.arena"))


@pytest.mark.timeout(60)
def test_a_payload_for_which_there_is_no_memory_is_refused_and_the_next_one_is_taken(tmp_path):
    """Announced lengths are within the limits, and may still be more than a machine has left."""
    payload = noise(78 << 20)

    async def ask(process, address):
        async with nodes(1) as [node]:
            peer = node.connect(address)
            await peer.call(Sum(), payload=noise(10), deadline=DEADLINE)
            limited = psutil.Process(process.pid)
            before = limited.rlimit(psutil.RLIMIT_AS)
            limited.rlimit(psutil.RLIMIT_AS, (limited.memory_info().vms + (64 << 20), before[1]))
            with pytest.raises(
                Refused, match=r"busy.*there is no memory for a payload of 81788928 bytes here; try again"
            ):
                await peer.call(Sum(), payload=payload, deadline=DEADLINE)
            limited.rlimit(psutil.RLIMIT_AS, before)
            answer = await peer.call(Sum(), payload=payload, deadline=DEADLINE)
            assert answer.body.total == int(payload.sum(dtype=np.int64))

    with server(f"ipc://{tmp_path}/s.sock") as (process, address):
        asyncio.run(ask(process, address))
