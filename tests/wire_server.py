"""A node in a process of its own, for tests that kill it, stop it, or send it whatever they like.

``wire_server.py ADDRESS ARENAS EPOCH`` prints the address it listens on and ends with its stdin.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from wire_cases import Count, Counted, answer, make_node


@contextmanager
def server(address, *, arenas=None, epoch=0):
    """A server process and its address; killed at the end, if it still lives."""
    tied = Path(__file__).with_name("tied.py")
    process = subprocess.Popen(
        [sys.executable, str(tied), str(os.getpid()), __file__, address, str(arenas or ""), str(epoch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
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


async def serve(address, arenas, epoch):
    node = make_node(arena_dir=Path(arenas) if arenas else None)
    node.epoch = int(epoch)
    print(await node.listen(address, partial(handle, node)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
