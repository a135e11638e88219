"""A process that has imported everything and waits: ranks are forked from it, in milliseconds instead of seconds.

Importing torch takes seconds of one core, for every rank and again at every restart. The cradle pays it once. What is forked
here becomes the child of whoever started the cradle (``client.py``, which asked the kernel for orphans): so that one sees it
die, it dies with that one, and the death of the cradle harms nobody.

Forking is safe because nothing but this one thread runs here: no event loop, no tensor was computed with.

    in   JSON and descriptors: {"module", "arguments", "environment", "descriptors"}, one message for each process
    out  "ready" once, or why not; then the pid of each process, when it is the starter's child
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shoal.comm.parentdeath import die_with_parent
from shoal.core.errors import EXIT_NO
from shoal.launch.child import count_threads, run_to_end, show_command_line, take_descriptors
from shoal.launch.forkclient import READY

_MOST_BYTES = 1 << 17
_MOST_DESCRIPTORS = 16
_MOST_REASON = 1000


def main() -> None:
    """Entry point: ``shoal.elastic.cradle DESCRIPTOR MODULE[:FUNCTION] ...`` serves until nobody asks any more.

    The modules are imported and the functions called before it is ready; an argument of dashes is room for command lines.
    """
    starter = os.getppid()
    line = socket.socket(fileno=int(sys.argv[1]))
    show_command_line([sys.executable, "-m", "shoal.elastic.cradle"])
    try:
        _warm_up(sys.argv[2:])
    except Exception as error:
        # Whoever started this can do without, and tells why it must.
        line.send(f"{type(error).__name__}: {error}".encode()[:_MOST_REASON])
        raise
    # What was imported is never garbage, and a collection in a rank would copy the pages it looks at.
    gc.collect()
    gc.freeze()
    line.send(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return
        line.send(str(_fork(json.loads(data), descriptors, line, starter)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _warm_up(names: Sequence[str]) -> None:
    for name in names:
        module, _, function = name.partition(":")
        if not name.startswith("-"):
            found = importlib.import_module(module)
            getattr(found, function)() if function else None
    if count_threads() != 1:
        raise RuntimeError(
            f"{count_threads()} threads run here, and a fork would copy one of them and the locks of all"
        )


def _fork(order: Mapping[str, Any], descriptors: Sequence[int], line: socket.socket, starter: int) -> int:
    """The pid of a new process that is the starter's child by now."""
    told, tell = os.pipe()
    # A signal to stop that comes before the new process can listen waits until it does (``trainer/worker.py``).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # Twice, and the one between ends: the process is an orphan then, and orphans go to the starter.
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            for descriptor in (told, tell):
                os.close(descriptor)
            line.close()
            _become(order, descriptors, starter)
        os.write(tell, str(pid).encode())
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.close(tell)
    # The kernel hands orphans over before it says that their parent has ended.
    os.waitpid(between, 0)
    pid = int(os.read(told, 32))
    os.close(told)
    return pid


def _become(order: Mapping[str, Any], descriptors: Sequence[int], starter: int) -> NoReturn:
    os.setsid()
    go, *streams = descriptors
    # The word comes when the starter knows of this process, which is its child by then. Before that it may have died, or have
    # started another one in its place: the pipe is closed then.
    if not os.read(go, 1):
        os._exit(EXIT_NO)
    os.close(go)
    die_with_parent(starter)
    take_descriptors(dict(zip((0, 1, 2, *order["descriptors"]), streams, strict=True)))
    os.environ.update(order["environment"])
    show_command_line([sys.executable, "-m", "shoal.launch.child", order["module"], *order["arguments"]])
    run_to_end(order["module"], order["arguments"])


if __name__ == "__main__":
    main()
