"""Somebody without a key opens more connections than a listener has descriptors for, and says nothing, or not enough.

Story: that ended a server with keys. No descriptor was left, so it could open no file and let nobody in.
"""

import asyncio
import contextlib
import selectors
import socket

import psutil
import pytest

from shoal.comm.wire.connections import choose_limits
from shoal.comm.wire.keys import make_keys
from support.wire.node_process import guarded_server
from support.wire.operations import DEADLINE, Echo, nodes, noise

DESCRIPTORS = 256
GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01CURVE" + b"\0" * 15 + b"\0" * 32


@contextlib.contextmanager
def strangers(address, *, source, count, says):
    """Connections of somebody without a key, all at once; the kernel goes on knocking for those that were not let in."""
    host, port = address.partition("#")[0].removeprefix("tcp://").split(":")
    opened = [socket.socket() for _ in range(count)]
    writable = selectors.DefaultSelector()
    try:
        for one in opened:
            one.bind((source, 0))
            one.setblocking(False)
            one.connect_ex((host, int(port)))
            writable.register(one, selectors.EVENT_WRITE)
        for key, _ in writable.select(1.0):
            with contextlib.suppress(OSError):
                key.fileobj.sendall(says)
        yield
    finally:
        writable.close()
        for one in opened:
            one.close()


@pytest.mark.parametrize(
    ("source", "says"),
    [("127.0.0.2", b""), ("127.0.0.1", GREETING)],
    ids=["silent, of another address", "greeting, of the clients' own address"],
)
def test_strangers_without_a_key_keep_nobody_out(tmp_path, source, says):
    keys = make_keys(tmp_path / "key")

    async def work(process, address):
        async with nodes(2, keys=keys) as (early, late):
            inside = early.connect(address)
            await inside.call(Echo(0), deadline=DEADLINE)
            with strangers(address, source=source, count=3 * DESCRIPTORS, says=says):
                for number in range(20):
                    found = await inside.call(Echo(number), payload=noise(300_000), deadline=DEADLINE)
                    assert bytes(found.payload) == noise(300_000).tobytes()
                await late.connect(address).call(Echo(1), deadline=DEADLINE)
                limits = choose_limits(DESCRIPTORS, 0)
                assert psutil.Process(process.pid).num_fds() < limits.waiting_per_address + 60
            assert early.counters.dropped == late.counters.dropped == 0
            await inside.call(Echo(1), deadline=DEADLINE)
        assert process.poll() is None

    with guarded_server(tmp_path / "key", descriptors=DESCRIPTORS) as (process, address):
        asyncio.run(work(process, address))
