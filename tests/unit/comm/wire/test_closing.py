"""A connection is closed in the moment in which its other side dies: this must not harm the process's other connections.

In a process of its own, because the harm is to the thread that does all of ZeroMQ's work, without which nothing ends in order.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import zmq

from shoal.comm.wire.node import Node, new_instance_id
from shoal.comm.wire.operations import Op, Operations

NUM_ROUNDS, NUM_PEERS = 20, 8
STUCK_SECONDS = 20.0


class Question(msgspec.Struct, frozen=True):
    """Nobody answers it."""


class Reply(msgspec.Struct, frozen=True):
    """What nobody sends."""


OPERATIONS = Operations({"question": Op(Question, Reply, max_payload=0)})


def test_closing_while_the_other_side_dies_leaves_other_connections_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "every question arrived\n"), done.stdout + done.stderr


async def _close_together(folder: Path) -> None:
    node, theirs = Node(instance_id=new_instance_id(), operations=OPERATIONS), zmq.Context()
    for turn in range(NUM_ROUNDS):
        others = [theirs.socket(zmq.ROUTER) for _ in range(NUM_PEERS)]
        addresses = [f"ipc://{folder}/{turn}-{number}.sock" for number in range(NUM_PEERS)]
        for other, address in zip(others, addresses, strict=True):
            other.bind(address)
        peers = [node.connect(address) for address in addresses]
        calls = [asyncio.ensure_future(peer.call(Question(), deadline=2 * STUCK_SECONDS)) for peer in peers]
        async with asyncio.timeout(STUCK_SECONDS):
            while not all(other.poll(0) for other in others):
                await asyncio.sleep(0.001)
        for other, peer in zip(others, peers, strict=True):
            other.close(linger=0)
            await peer.close()
        await asyncio.gather(*calls, return_exceptions=True)
    await node.close()
    theirs.term()


def main() -> None:
    try:
        asyncio.run(_close_together(Path(sys.argv[1])))
        print("every question arrived", flush=True)
        code = 0
    except TimeoutError:
        print("a question never arrived: the thread of this process's connections is stuck", flush=True)
        code = 1
    # Not sys.exit: with a stuck thread it would not end.
    os._exit(code)


if __name__ == "__main__":
    main()
