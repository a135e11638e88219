"""What keeps the command line quick: typer without the imports that it makes on the way to a help text or a completion.

typer reaches for pydantic to convert an option that was not given, and for rich to strip markup that our help texts do not have.
Each costs 0.1 s, on every ``--help`` and on every press of the Tab key.
"""

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

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
