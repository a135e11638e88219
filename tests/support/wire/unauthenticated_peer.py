"""Somebody on another machine without a key who tries everything.

``unauthenticated_peer.py scan HOST [PORT...]`` prints which ports are open, of all where none is named.

``unauthenticated_peer.py attack HOST PORT:KEY...`` prints ``began`` after each update on every port, goes on until its stdin
ends, and prints how many attempts there were, and which of them somebody answered.
"""

import asyncio
import contextlib
import itertools
import json
import selectors
import socket
import sys

import msgspec
import zmq

from shoal.comm.wire.errors import Refused, WireError
from shoal.comm.wire.keys import Keys
from shoal.comm.wire.message import PROTOCOL_VERSION
from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.election.majority import Seek
from shoal.paramserver.center.candidate import CLUSTER_OPERATIONS
from shoal.paramserver.messages import Ask, Dead, Fetch, Halt, Join, Over, Pull, Push

SECONDS = 0.6
NUM_IDLE = 600
GREETING_BYTES = 64
ALL_PORTS = range(1, 65536)
AT_ONCE = 2000


def scan(host, ports):
    """Those of a host's TCP ports that somebody listens on."""
    found = []
    for start in range(0, len(ports), AT_ONCE):
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as opened:
            for port in ports[start : start + AT_ONCE]:
                one = opened.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex((host, port))
                waiting.register(one, selectors.EVENT_WRITE, port)
            while waiting.get_map():
                ready = waiting.select(1.0)
                for key, _ in ready:
                    if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        found.append(key.data)
                    waiting.unregister(key.fileobj)
                if not ready:
                    break
    return sorted(found)


def demands():
    """Who tries to join, to kill, to change and to read."""
    yield Join(name="worker-9", role="worker", address="", model={}), None
    yield Dead(member="server-0", reason="so it is"), None
    yield Halt(reason="enough"), None
    yield Over(halt=""), None
    yield Push(shard=0, number=0, version=0), memoryview(b"\0" * 64)
    yield Pull(shard=0, need=0), None
    yield Fetch(shard=0), None
    yield Ask(), None
    yield Seek(), None


async def ask_with_a_key_of_its_own(address):
    """With a key that is on no list; the public one of who listens is known."""
    public, secret = (zmq.utils.z85.decode(key) for key in zmq.curve_keypair())
    node = Node(instance_id=new_instance_id(), operations=CLUSTER_OPERATIONS, keys=Keys(public=public, secret=secret))

    async def ask(body, payload):
        try:
            await node.connect(address).call(body, payload=payload, deadline=SECONDS)
        except Refused as error:
            return [f"{body} was answered with {error}"]
        except WireError:
            return []
        return [f"{body} was answered"]

    found = await asyncio.gather(*(ask(body, payload) for body, payload in demands()))
    await node.close()
    return len(found), list(itertools.chain(*found))


async def ask_without_a_key(endpoint):
    """As ZeroMQ does without encryption."""
    context = zmq.Context()
    door = context.socket(zmq.DEALER)
    door.linger = 0
    door.connect(endpoint)
    bodies = list(demands())
    for body, _ in bodies:
        header = {"version": PROTOCOL_VERSION, "operation": type(body).__name__.lower(), "sender": "0" * 16}
        with contextlib.suppress(zmq.Again):
            door.send_multipart([msgspec.msgpack.encode(header), msgspec.msgpack.encode(body)], zmq.NOBLOCK)
    await asyncio.sleep(SECONDS)
    answers = [f"{endpoint} answered one without a key"] if door.poll(0) else []
    door.close()
    context.term()
    return len(bodies), answers


async def ask_in_other_tongues(endpoint):
    """Bytes that are nothing, or another protocol; more than ZeroMQ's greeting is an answer."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    found = []
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4096, b"\xff" * 4096):
        heard = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(SECONDS):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(said)
                while part := await reader.read(4096):
                    heard += part
        if len(heard) > GREETING_BYTES:
            found.append(f"{endpoint} answered {said[:10]!r} with {len(heard)} bytes")
    return 3, found


def knock(host, port):
    """A connection on which nothing will be said."""
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((host, port))
    return one


def is_closed(one):
    """True when whoever listens has hung up."""
    try:
        return one.recv(GREETING_BYTES) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def attack(host, doors):
    """Try everything on every port, again and again, with hundreds of idle connections open, of which none is given up."""
    ports = {int(door.partition(":")[0]): door.partition(":")[2] for door in doors}
    idle = [(port, knock(host, port)) for port in ports for _ in range(NUM_IDLE)]
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    attempts, answered = 0, []
    while not over.done():
        tries = []
        for port, key in ports.items():
            endpoint = f"tcp://{host}:{port}"
            tries += [
                ask_with_a_key_of_its_own(f"{endpoint}#{key}"),
                ask_without_a_key(endpoint),
                ask_in_other_tongues(endpoint),
            ]
        for number, found in await asyncio.gather(*tries):
            attempts += number
            answered += found
        for index, (port, one) in enumerate(idle):
            if is_closed(one):
                one.close()
                idle[index] = port, knock(host, port)
        print("began", flush=True)
    print(json.dumps({"attempts": attempts, "answered": answered}), flush=True)
    for _, one in idle:
        one.close()


if __name__ == "__main__":
    if sys.argv[1] == "scan":
        print(json.dumps(scan(sys.argv[2], [int(port) for port in sys.argv[3:]] or ALL_PORTS)))
    else:
        asyncio.run(attack(sys.argv[2], sys.argv[3:]))
