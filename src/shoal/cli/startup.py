"""What keeps the command line quick: typer without the imports that it makes on the way to a help text or a completion.

typer reaches for pydantic to convert an option that was not given, and for rich to strip markup that our help texts do not have.
Each costs 0.1 s, on every ``--help`` and on every press of the Tab key.
"""

import os
import sys
from typing import Any

from typer.core import TyperGroup


class LightGroup(TyperGroup):
    """A group of verbs whose switches are off, not missing, when they are not given: an off switch needs no conversion."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the group, typer's own ``--help`` and ``--install-completion`` among them."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_bool_flag", False) and param.default is None:
                param.default = False
        return params


def prepare_completion() -> None:
    """Keep rich out of a process that a shell started to ask for completions."""
    if "_SHOAL_COMPLETE" in os.environ:
        sys.modules["rich"] = None  # type: ignore[assignment]
