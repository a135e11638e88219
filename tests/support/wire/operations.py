"""A table of operations, a node that answers it, and a raw socket that sends whatever a test likes."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import torch
import zmq

from shoal.comm.wire.node import Node, new_instance_id
from shoal.comm.wire.operations import Body, Op, Operations

DEADLINE = 10.0


class Echo(Body, frozen=True):
    number: int
    seconds: float = 0.0


class Echoed(Body, frozen=True):
    number: int


class Sum(Body, frozen=True):
    pass


class Summed(Body, frozen=True):
    total: int


class Late(Body, frozen=True):
    """Answered whatever the epoch is."""


class Count(Body, frozen=True):
    """Asks what was counted, whatever the epoch is."""


class Counted(Body, frozen=True):
    counts: dict[str, int]
    resident_bytes: int
    num_streams: int


OPERATIONS = Operations(
    {
        "echo": Op(Echo, Echoed, max_payload=80 << 20),
        "sum": Op(Sum, Summed, max_payload=80 << 20),
        "late": Op(Late, Late, max_payload=0, fenced=False),
        "count": Op(Count, Counted, max_payload=0, fenced=False),
    }
)


async def answer(request):
    """What the node of these tests does: gives a payload back, adds one up, or nothing."""
    match request.body:
        case Echo(number=number, seconds=seconds):
            if seconds:
                await asyncio.sleep(seconds)
            await request.answer(Echoed(number), payload=request.payload)
        case Sum():
            total = int(np.frombuffer(request.payload, np.uint8).sum(dtype=np.int64))
            await request.answer(Summed(total))
        case Late():
            await request.answer(Late())


def make_node(**options) -> Node:
    return Node(instance_id=new_instance_id(), operations=OPERATIONS, **options)


@asynccontextmanager
async def nodes(num, **options):
    """Nodes that are closed at the end, whatever happens."""
    made = [make_node(**options) for _ in range(num)]
    try:
        yield made
    finally:
        for node in made:
            await node.close()


def noise(num_bytes, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


async def until(condition, seconds=5.0):
    """Wait for something that the event loop brings about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def raw_dealer(address):
    """A socket without any of the wire's manners."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def as_tensor(message):
    """The payload of a request or an answer, not copied, with the dtype and shape that its header says."""
    dtype = getattr(torch, message.header.dtype)
    if not message.payload.nbytes:
        return torch.empty(message.header.shape, dtype=dtype)
    return torch.frombuffer(message.payload, dtype=dtype).reshape(message.header.shape)
