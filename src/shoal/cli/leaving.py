"""A command ends when it is done, and not when something that it runs calls exit.

A recipe's model and data are run in this process too: to check a request, to evaluate, as a rank of somebody's launcher. One that
calls ``sys.exit(0)`` or ``os._exit(0)``, or a library of it, would make a success of a command that did nothing. A supervisor
sees that from outside (``telemetry/statusboard.py``); here nobody is outside, so both are caught where Python calls them. What
native code does by itself cannot be.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from shoal.core.errors import EXIT_NO, RunError

_OURS = ("shoal", "typer", "click")


@contextlib.contextmanager
def only_when_done() -> Iterator[None]:
    """Turn an exit that neither Shoal nor its command line asked for into an error.

    Raises:
        RunError: something raised ``SystemExit``; says where.
    """
    owner, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        frame = sys._getframe(1)
        # A process that the user's code forked ends as it likes.
        if os.getpid() != owner or _is_ours(frame):
            leave(status)
        print(f"error: {_describe(frame, f'os._exit({status})')}", file=sys.stderr, flush=True)
        leave(EXIT_NO)

    os._exit = refuse
    try:
        yield
    except SystemExit as asked:
        trace = asked.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # rich leaves like this when whoever read its output has gone.
        is_unread = isinstance(asked.__context__, BrokenPipeError)
        if os.getpid() != owner or trace is None or is_unread or _is_ours(trace.tb_frame):
            raise
        raise RunError(_describe(trace.tb_frame, f"sys.exit({asked.code!r})", line=trace.tb_lineno)) from asked
    finally:
        os._exit = leave


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _describe(frame: FrameType, call: str, *, line: int | None = None) -> str:
    where = f"{frame.f_code.co_filename}:{line or frame.f_lineno}"
    return f"{where} called {call} before the command was done; nothing of it counts. Take that call out, or raise an error there"
