"""A process that has imported everything and waits: the roles of a run are forked from it, in milliseconds instead of seconds.

Importing torch takes seconds of one core, for every server and worker, and again for each that died and is started again. The
nursery pays it once. A role that is forked here is handed over to the crew at once, which becomes its parent (it asked the kernel
for orphans): so the crew sees it die, it dies with the crew, and the death of the nursery harms nobody.

Forking is safe because nothing but this one thread runs here: no event loop, no socket, no tensor was computed with.

    in   one JSON object a line: {"module", "arguments", "environment", "log"}
    out  the pid of the process that runs it, a line each
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from shoal.comm.lifeline import die_with_parent
from shoal.core.errors import EXIT_DONE, EXIT_NO
from shoal.optim.build import build_optimizer
from shoal.optim.config import OptimConfig

_ADOPTION_SECONDS = 10.0


def warm_up() -> None:
    """Import what roles need, and what torch itself leaves for the first optimizer."""
    for module in ("serving", "working", "centering", "closing", "role"):
        importlib.import_module(f"shoal.trainer.servers.{module}")
    build_optimizer(OptimConfig(), nn.Linear(1, 1))


def main() -> None:
    """Entry point: serves until its standard input ends."""
    crew = os.getppid()
    show_command_line([sys.executable, "-m", "shoal.trainer.servers.nursery"])
    warm_up()
    if sys.platform == "linux":
        running = len(os.listdir("/proc/self/task"))
        assert running == 1, f"{running} threads run here: a fork would copy one of them, and the locks of all"
    # What was imported is never garbage, and a collection in a role would copy the pages it looks at.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        _start(json.loads(line), crew)


def _start(wanted: dict[str, Any], crew: int) -> None:
    # Twice, and the one between ends: the role is an orphan then, and orphans go to the crew.
    between = os.fork()
    if between == 0:
        role = os.fork()
        if role == 0:
            _become(wanted, crew)
        os.write(1, f"{role}\n".encode())
        os._exit(0)
    os.waitpid(between, 0)


def _become(wanted: dict[str, Any], crew: int) -> None:
    """Be the role, and never return."""
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != crew:
        if time.monotonic() > end:
            os._exit(EXIT_NO)
        time.sleep(0.001)
    die_with_parent(crew)
    os.setsid()
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(wanted["environment"])
    sys.argv = [wanted["module"], *wanted["arguments"]]
    show_command_line([sys.executable, "-m", wanted["module"], *wanted["arguments"]])
    gc.unfreeze()
    module = importlib.import_module(wanted["module"])
    code = EXIT_NO
    try:
        module.main()
        code = EXIT_DONE
    except BaseException:
        # The end of a process that has no interpreter to print this for it.
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def show_command_line(arguments: list[str]) -> None:
    """Let ``ps`` and ``/proc`` show what this process is, in the memory of the command line that it was started with."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    # Fields 48 and 49 of the man page proc(5), which counts from 1 and has two before the parenthesis ends.
    start, end = int(words[45]), int(words[46])
    text = b"\0".join(argument.encode() for argument in arguments)[: end - start - 1]
    if start and end > start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
