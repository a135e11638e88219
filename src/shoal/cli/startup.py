"""The process of a command: quick to start, and at its end only when it is done.

typer reaches for pydantic to convert an option that was not given, and for rich to strip markup that our help texts do not have.
Each costs 0.1 s, on every ``--help`` and on every press of the Tab key; ``LightGroup`` and ``LightCommand`` do without.

A recipe's model and data are run in this process too: to check a request, to evaluate, as a rank of somebody's launcher. One that
calls ``sys.exit(0)`` or ``os._exit(0)``, or a library of it, would make a success of a command that did nothing. A supervisor
sees that from outside; here there is nobody outside, so ``only_when_done`` catches both where Python calls them. What native code
does by itself cannot be caught.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from typer.core import TyperCommand, TyperGroup

from shoal.core.errors import EXIT_NO, RunError

_PLAIN = (str, int, float, Path)
"""Types that make themselves out of text."""


class LightGroup(TyperGroup):
    """A group of verbs whose switches are off, not missing, when they are not given: an off switch needs no conversion."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the group, typer's own ``--help`` and ``--install-completion`` among them."""
        return _switched_off(super().get_params(ctx))


class LightCommand(TyperCommand):
    """A verb that answers in a blink: plain values are converted by their own types, and only what those refuse by typer.

    For verbs that need no pydantic themselves; the others load it anyhow.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the verb."""
        params = _switched_off(super().get_params(ctx))
        for param in params:
            # The list is asked for several times, and the options stay the same.
            if "process_value" not in vars(param):
                param.process_value = partial(_process_value, param, param.process_value)
        return params


def _switched_off(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_bool_flag", False) and param.default is None:
            param.default = False
    return params


def _process_value(param: Any, typers_own: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """The value of an option, or of an argument. What is wrong goes to typer, which has the words for it."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    is_plain = kind in _PLAIN or (isinstance(kind, type) and issubclass(kind, StrEnum))
    if not is_plain or param.callback is not None or param.nargs != 1 or getattr(param, "multiple", False):
        return typers_own(ctx, value)
    if value is None:
        return typers_own(ctx, value) if param.required else None
    assert kind is not None
    try:
        return kind(value)
    except ValueError:
        return typers_own(ctx, value)


def prepare_completion() -> None:
    """Keep rich out of a process that a shell started to ask for completions."""
    if "_SHOAL_COMPLETE" in os.environ:
        sys.modules["rich"] = None  # type: ignore[assignment]


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
        # rich leaves like this when the reader of its output has gone.
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
