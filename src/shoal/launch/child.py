"""How a new process begins: its life is tied to its starter's, and then it becomes what it was started for.

An interpreter of its own begins with ``python -m shoal.launch.child MODULE ARGUMENTS``, which runs MODULE as ``__main__``. It
does so before torch is imported, because that takes seconds, and a supervisor that dies in those seconds must not leave the
rank behind.

A fork of a process that has imported everything (``forkserver.py``) begins with ``run_to_end``, as a fresh interpreter would.
Two things differ from a fresh one: all forks have one seed for the hashes of strings, and the interpreter is not torn down at
the end.
"""

import contextlib
import ctypes
import fcntl
import importlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from shoal.comm.parentdeath import die_with_parent
from shoal.core.errors import EXIT_DONE, EXIT_NO


def count_threads() -> int:
    """Threads of this process; a fork copies one of them, and the locks of all."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1


def take_descriptors(wanted: Mapping[int, int]) -> None:
    """Give descriptors that this process was sent the numbers under which they are wanted, and close the old ones."""
    # Above all numbers that are wanted first: one of those may be that of another one now.
    above = {number: fcntl.fcntl(given, fcntl.F_DUPFD, max(wanted) + 1) for number, given in wanted.items()}
    for given in set(wanted.values()):
        os.close(given)
    for number, descriptor in above.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def run_to_end(module: str, arguments: Sequence[str]) -> NoReturn:
    """Call ``main`` of the module that a process is for, and end with its exit code.

    SIGTERM, which the fork server holds back, is let in before that; by the module itself where it says ``LISTENS_BY_ITSELF``.
    """
    # A fresh process would have drawn its own; random does so by itself after a fork.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    sys.argv = [module, *arguments]
    code = EXIT_NO
    try:
        found = importlib.import_module(module)
        if not getattr(found, "LISTENS_BY_ITSELF", False):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        found.main()
        code = EXIT_DONE
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:
        # The end of a process that has no interpreter to print this for it.
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def show_command_line(arguments: Sequence[str]) -> None:
    """Let ``ps`` and ``/proc`` show what this process is, in the memory of the command line that it was started with."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    # Fields 48 and 49 of the man page proc(5), which counts from 1 and has two before the parenthesis ends.
    start, end = int(words[45]), int(words[46])
    text = b"\0".join(os.fsencode(argument) for argument in arguments)[: end - start - 1]
    if start and end > start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main() -> None:
    """Die with the parent, and run the module that the command line names."""
    die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
