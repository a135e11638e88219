"""Shoal's wire: a server process that holds the weights, and a worker that pushes a gradient and pulls the weights."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from shoal.comm.parentdeath import die_with_parent
from shoal.comm.wire.keys import Keys, load_keys, make_keys
from shoal.comm.wire.listener import Request
from shoal.comm.wire.node import Node, new_instance_id
from shoal.comm.wire.operations import Body, Op, Operations

RATE = 1e-3
SECONDS = 60.0


class Push(Body, frozen=True):
    """A gradient."""


class Pushed(Body, frozen=True):
    """It is applied."""


class Pull(Body, frozen=True):
    """Asks for the weights."""


class Pulled(Body, frozen=True):
    """The weights."""


OPERATIONS = Operations({"push": Op(Push, Pushed), "pull": Op(Pull, Pulled)})


def make_node(name: str, folder: Path) -> Node:
    keys: Keys | None = load_keys(folder / "key") if name == "curve" else None
    arenas = folder if name in ("shared", "view", "tcp-shared") else None
    return Node(instance_id=new_instance_id(), operations=OPERATIONS, keys=keys, arena_dir=arenas)


async def serve(name: str, folder: Path, num_bytes: int) -> None:
    weights = torch.zeros(num_bytes // 4)

    async def handle(request: Request) -> None:
        if isinstance(request.body, Push):
            assert request.payload is not None
            weights.add_(torch.frombuffer(request.payload, dtype=torch.float32), alpha=-RATE)
            await request.answer(Pushed())
        else:
            await request.answer(Pulled(), payload=weights)

    node = make_node(name, folder)
    address = f"ipc://{folder}/server.sock" if name in ("shared", "view") else "tcp://127.0.0.1:0"
    print(await node.listen(address, handle), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.close()


async def drive(name: str, folder: Path, num_bytes: int, address: str) -> None:
    node = make_node(name, folder)
    peer = node.connect(address)
    gradient, weights = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    num_pushed = 0
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            await peer.call(Push(), payload=gradient, deadline=SECONDS)
            answer = await peer.call(Pull(), deadline=SECONDS, into=None if name == "view" else weights)
            seconds.append(time.perf_counter() - started)
            num_pushed += 1
            assert answer.payload is not None
            last = torch.frombuffer(answer.payload, dtype=torch.float32)[-1].item()
            assert abs(last + RATE * num_pushed) < 1e-4, (last, num_pushed)
            del answer
        print(json.dumps(seconds), flush=True)
    await node.close()


def main() -> None:
    torch.set_num_threads(1)
    name, folder, num_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if len(sys.argv) > 4:
        die_with_parent(int(sys.argv[4]))
        asyncio.run(serve(name, folder, num_bytes))
        return
    if name == "curve":
        make_keys(folder / "key")
    server = subprocess.Popen(
        [sys.executable, *sys.argv, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    asyncio.run(drive(name, folder, num_bytes, server.stdout.readline().strip()))
    server.stdin.close()
    server.wait()


if __name__ == "__main__":
    main()
