"""A process made ready once, so that others are forked from what it has built, which they share until one of them writes to it.

The fork server (``forkserver.py``) forks this process, which calls one function and then forks ranks in the server's place until
its release. What the function built is in every rank from the start, and costs its memory once. The server itself stays as it
was, so a function that cannot be shared costs nothing but its time, and a new generation of ranks gets a new template.

A fork copies one thread, and shares open files and what is outside of memory. So a function that leaves a thread, a descriptor
or a process behind is refused: each rank then does by itself what the function did.
"""

import contextlib
import ctypes
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.core.clock import Deadline
from shoal.launch.child import count_threads

_THREADS_END_SECONDS = 2.0
_PAUSE_HARD = 2
"""``omp_pause_hard`` of OpenMP 5.0, section 3.2.43: threads are ended, and started again by the next parallel region."""
_TASKS = Path("/proc/self/task")


class CannotShareError(Exception):
    """What was to be built cannot be shared; says why, or nothing where nobody needs to know."""


class Printed:
    """What a function printed in the template, for each fork to print again: as if the fork had called it."""

    def __init__(self) -> None:
        self._texts: dict[int, bytes] = {}

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Keep what this process prints meanwhile."""
        with contextlib.ExitStack() as opened:
            files = {number: opened.enter_context(tempfile.TemporaryFile()) for number in (1, 2)}
            kept = {number: os.dup(number) for number in files}
            for number, file in files.items():
                os.dup2(file.fileno(), number)
            try:
                yield
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for number, file in files.items():
                    os.dup2(kept[number], number)
                    os.close(kept[number])
                    file.seek(0)
                    self._texts[number] = file.read()

    def replay(self) -> None:
        """Print it, in the fork."""
        for number, text in self._texts.items():
            with contextlib.suppress(OSError):
                os.write(number, text)


def make_ready(name: str, arguments: Sequence[str]) -> Printed:
    """Call ``module:function`` with its arguments, and see that this process can be forked afterwards.

    Raises:
        CannotShareError: it left behind what a fork cannot have.
    """
    module, _, function = name.partition(":")
    printed = Printed()
    found = getattr(importlib.import_module(module), function)
    files = _open_files()
    with printed.catching():
        found(*arguments)
    _end_compute_threads()
    left = {
        "threads": count_threads() - 1,
        "open files": len(_open_files() - files),
        "processes": _count_children(),
    }
    problems = [f"{count} {what}" for what, count in left.items() if count > 0]
    if problems:
        raise CannotShareError(f"building it left {' and '.join(problems)} open, which processes cannot share")
    return printed


def _count_children() -> int:
    # A kernel may be built without this file.
    with contextlib.suppress(OSError):
        return sum(len((task / "children").read_text().split()) for task in _TASKS.iterdir())
    return 0


def _open_files() -> set[str]:
    # Without the descriptor that the listing itself was made by, which is closed by now.
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def _end_compute_threads() -> None:
    """End the threads of OpenMP, which computed for the function: a fork would wait for them for ever."""
    if count_threads() == 1:
        return
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    for path in libraries:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)
    limit = Deadline(seconds=_THREADS_END_SECONDS)
    while count_threads() > 1 and not limit.is_over:
        # The kernel lists a thread for a moment after it was joined.
        os.sched_yield()
