"""The fork server: a process that has imported everything and waits, so that others begin in milliseconds instead of seconds.

Importing torch takes seconds of one core, for every rank and again at every restart. The server pays it once. What is forked
here becomes the child of the server's starter (``forkclient.py``): so that one sees it die, it dies with that one, and the death
of the server harms nobody.

Forking is safe because nothing but this one thread runs here: no event loop, no tensor was computed with. What is to be built
before a fork is built in a fork of its own, the template (``template.py``), which serves in this one's place until its release.

    in   "fork" with descriptors: the order as JSON (``ForkClient.start``), a pipe that says when to go, the directory, and what
         the process inherits; "prepare" with the order and the directory; "release"
    out  "ready" once, or why not; "ready" of a template, or why there is none; the pid of each process, when it is the starter's
         child
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from shoal.comm.parentdeath import die_with_parent
from shoal.core.errors import EXIT_DONE, EXIT_NO
from shoal.launch.child import count_threads, run_to_end, show_command_line, take_descriptors
from shoal.launch.forkclient import NOT_TOLD, PREPARE, READY, RELEASE
from shoal.launch.template import CannotShareError, Printed, make_ready

_MOST_BYTES = 16
_MOST_DESCRIPTORS = 16
_MOST_REASON = 1000


def main() -> None:
    """Entry point: ``shoal.launch.forkserver DESCRIPTOR MODULE[:FUNCTION] ...`` serves until nobody asks any more.

    The modules are imported and the functions called before it is ready; an argument of dashes is room for command lines.
    """
    starter = os.getppid()
    line = socket.socket(fileno=int(sys.argv[1]))
    names = [name for name in sys.argv[2:] if not name.startswith("-")]
    show_command_line([sys.executable, "-m", "shoal.launch.forkserver", *names])
    try:
        _preload(names)
    except Exception as error:
        # The starter can do without a server, and says why it must.
        line.send(f"{type(error).__name__}: {error}".encode()[:_MOST_REASON])
        raise
    # What was imported is never garbage, and a collection in a fork would copy the pages it looks at.
    gc.collect()
    gc.freeze()
    line.send(READY)
    _serve(line, starter)


def _serve(line: socket.socket, starter: int, printed: Printed | None = None) -> None:
    """Fork until nobody asks any more; a template, which has caught what was printed in it, until it is released."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data or (data == RELEASE and printed is not None):
            return
        if data == PREPARE:
            _run_template(descriptors, line, starter)
        elif data != RELEASE:
            # A release comes here when the template that it was for has died.
            line.send(str(_fork(descriptors, line, starter, printed)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _run_template(descriptors: Sequence[int], line: socket.socket, starter: int) -> None:
    """Let a fork of this process prepare itself and serve, and go on when it has ended."""
    server = os.getpid()
    template = os.fork()
    if template == 0:
        code = EXIT_NO
        try:
            code = _be_template(descriptors, line, starter, server)
        finally:
            os._exit(code)
    _, status = os.waitpid(template, 0)
    if status != 0:
        line.send(f"the process that built it ended with {os.waitstatus_to_exitcode(status)}".encode())


def _be_template(descriptors: Sequence[int], line: socket.socket, starter: int, server: int) -> int:
    die_with_parent(server)
    text, here = descriptors
    os.fchdir(here)
    with open(text, encoding="utf-8", closefd=False) as file:
        file.seek(0)
        order = json.load(file)
    os.environ.clear()
    os.environ.update(order["environment"])
    try:
        printed = make_ready(order["function"], order["arguments"])
    except CannotShareError as reason:
        line.send(str(reason).encode()[:_MOST_REASON] or NOT_TOLD)
        return EXIT_DONE
    except Exception:
        # Each rank meets the same error by itself, and says it with everything that a rank says.
        line.send(NOT_TOLD)
        return EXIT_DONE
    line.send(READY)
    _serve(line, starter, printed)
    return EXIT_DONE


def _preload(names: Sequence[str]) -> None:
    for name in names:
        module, _, function = name.partition(":")
        found = importlib.import_module(module)
        getattr(found, function)() if function else None
    if count_threads() != 1:
        raise RuntimeError(
            f"{count_threads()} threads run here, and a fork would copy one of them and the locks of all"
        )


def _fork(descriptors: Sequence[int], line: socket.socket, starter: int, printed: Printed | None) -> int:
    """The pid of a new process that is the starter's child by now."""
    reading, writing = os.pipe()
    # A stop request that comes before the new process can listen waits until it does (``run_to_end``), instead of ending it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # Twice, and the one between ends: the process is an orphan then, and orphans go to the starter.
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            for descriptor in (reading, writing):
                os.close(descriptor)
            line.close()
            _become(descriptors, starter, printed)
        os.write(writing, str(pid).encode())
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.close(writing)
    # The kernel hands orphans over before it says that their parent has ended.
    os.waitpid(between, 0)
    pid = int(os.read(reading, 32))
    os.close(reading)
    return pid


def _become(descriptors: Sequence[int], starter: int, printed: Printed | None) -> NoReturn:
    os.setsid()
    text, go, here, *files = descriptors
    # The word comes when the starter knows of this process, which is its child by then. Before that it may have died, or have
    # started another one in its place: the pipe is closed then.
    if not os.read(go, 1):
        os._exit(EXIT_NO)
    os.close(go)
    die_with_parent(starter)
    os.fchdir(here)
    os.close(here)
    os.lseek(text, 0, os.SEEK_SET)
    with open(text, encoding="utf-8") as file:
        order = json.load(file)
    take_descriptors(dict(zip((0, 1, 2, *order["descriptors"]), files, strict=True)))
    if printed is not None:
        printed.replay()
    os.environ.clear()
    os.environ.update(order["environment"])
    show_command_line([sys.executable, "-m", "shoal.launch.child", order["module"], *order["arguments"]])
    run_to_end(order["module"], order["arguments"])


if __name__ == "__main__":
    main()
