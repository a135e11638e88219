"""A node with keys in a process of its own that may have few descriptors: for each request it opens a file, as a server does.

``guarded_server.py KEY DESCRIPTORS`` prints the address it listens on and ends with its stdin.
"""

import asyncio
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from shoal.comm.wire.connections import raise_descriptor_limit
from shoal.comm.wire.keys import load_keys
from wire_cases import answer, make_node


@contextmanager
def guarded_server(key, *, descriptors):
    """A server process and its address; killed at the end, if it still lives."""
    tied = Path(__file__).with_name("tied.py")
    process = subprocess.Popen(
        [sys.executable, str(tied), str(os.getpid()), __file__, str(key), str(descriptors)],
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


async def handle(request):
    with open(__file__, "rb") as file:
        file.read(1)
    await answer(request)


async def serve(key, descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors) // 2, int(descriptors)))
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == int(descriptors)
    node = make_node(keys=load_keys(Path(key)))
    print(await node.listen("tcp://127.0.0.1:0", handle), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
