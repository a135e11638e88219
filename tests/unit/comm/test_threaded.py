"""Operations beside what a rank computes, when the mesh is closed while one of them is under way."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from shoal.comm import threaded
from shoal.comm.channel import Channel
from shoal.comm.mesh import Mesh
from shoal.comm.shared import SLOT_BYTES, SharedTransport
from shoal.comm.sharedmemory import GroupMemory, memory_bytes
from shoal.comm.threaded import ThreadedTransport
from shoal.comm.trafficcounter import TrafficCounter
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.telemetry.statusboard import unnamed_file


@pytest.fixture
def memory():
    descriptor = unnamed_file("test")
    os.ftruncate(descriptor, memory_bytes(2, SLOT_BYTES))
    yield GroupMemory(descriptor, num_ranks=2, slot_bytes=SLOT_BYTES)
    os.close(descriptor)


def test_memory_that_an_operation_uses_is_not_unmapped_under_it(memory, monkeypatch):
    monkeypatch.setattr(threaded, "_JOIN_SECONDS", 0.05)
    rounds = SimpleNamespace(member=SimpleNamespace(rank=0), close=lambda: None)
    transport = ThreadedTransport(SharedTransport(memory, rounds), name="dp", deadline_seconds=20.0)
    channel = Channel("dp", rank=0, size=2, transport=transport, traffic=TrafficCounter())
    mesh = Mesh(
        degrees=dict.fromkeys(Axis, 1),
        coordinates=dict.fromkeys(Axis, 0),
        channels={Axis.DATA: channel},
        replicas=channel,
        everyone=channel,
        traffic=TrafficCounter(),
    )
    begun, go_on, written = threading.Event(), threading.Event(), []

    def wait_and_write(_inner):
        begun.set()
        assert go_on.wait(20)
        if memory.bytes.numel():  # Otherwise the process would die of it here.
            memory.slot(0, 0, torch.float32).fill_(1.0)
            written.append(True)

    started = transport.start("all_gather", wait_and_write)
    assert begun.wait(20)
    try:
        mesh.close()
        mesh.close()
    finally:
        go_on.set()
    with pytest.raises(RunError, match="the mesh is closed"):
        started.wait()
    assert written, "the memory was taken away"


def test_a_closed_transport_says_so_and_keeps_nobody_waiting(memory):
    rounds = SimpleNamespace(member=SimpleNamespace(rank=0), close=lambda: None)
    transport = ThreadedTransport(SharedTransport(memory, rounds), name="dp", deadline_seconds=20.0)
    transport.start("all_gather", lambda _inner: None).wait()
    assert transport.close() and transport.close()
    with pytest.raises(RunError, match="the mesh is closed, so axis dp"):
        transport.start("all_gather", lambda _inner: None).wait()
    assert transport.close()
