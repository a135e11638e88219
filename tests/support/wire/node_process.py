"""A node in a process of its own, for tests that kill it, stop it, or send it whatever they like.

``node_process.py open ADDRESS ARENAS EPOCH`` and ``node_process.py guarded KEY DESCRIPTORS`` print the address they listen on
and end with their stdin. The guarded one has keys and may have few descriptors: for each request it opens a file, as a server
does.
"""

import asyncio
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from shoal.comm.wire.connections import raise_descriptor_limit
from shoal.comm.wire.keys import load_keys
from support.processes.command import python_of_session
from support.wire.operations import Count, Counted, answer, make_node


def server(address, *, arenas=None, epoch=0):
    """A server process and its address; killed at the end, if it still lives."""
    return _started("open", address, str(arenas or ""), str(epoch))


def guarded_server(key, *, descriptors):
    """The same with keys, on a port of loopback."""
    return _started("guarded", key, descriptors)


@contextmanager
def _started(*arguments):
    process = subprocess.Popen(
        python_of_session(__file__, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def handle(node, request):
    if isinstance(request.body, Count):
        [listener] = node._listeners
        resident = psutil.Process().memory_info().rss
        await request.answer(Counted(dict(node.counters.as_dict()), resident, len(listener._streams)))
    else:
        await answer(request)


async def open_and_handle(request):
    with open(__file__, "rb") as file:
        file.read(1)
    await answer(request)


async def serve(address, arenas, epoch):
    node = make_node(arena_dir=Path(arenas) if arenas else None)
    node.epoch = int(epoch)
    await listen(node, address, partial(handle, node))


async def serve_guarded(key, descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors) // 2, int(descriptors)))
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == int(descriptors)
    await listen(make_node(keys=load_keys(Path(key))), "tcp://127.0.0.1:0", open_and_handle)


async def listen(node, address, handler):
    print(await node.listen(address, handler), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.close()


if __name__ == "__main__":
    asyncio.run({"open": serve, "guarded": serve_guarded}[sys.argv[1]](*sys.argv[2:]))
