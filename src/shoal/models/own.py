"""The user's own model and loss, by name. Torch is not imported here: the command line checks names before it starts anything."""

from collections.abc import Callable
from typing import Any

from shoal.core.functions import bind_arguments, takes_argument
from shoal.core.functions import load_function as load_function
from shoal.models.config import AnyModelConfig, OwnModelConfig
from shoal.models.shape import DataShape


def load_build(config: OwnModelConfig, spec: DataShape | None) -> Callable[[], Any]:
    """The user's build with its arguments bound, ready to be called.

    Raises:
        RequestError: it cannot be imported, or does not take the arguments of the recipe.
    """
    function = load_function(config.build, key="model.build")
    arguments = dict(config.args)
    if takes_argument(function, "spec") and "spec" not in arguments:
        arguments["spec"] = spec
    bind_arguments(function, arguments, key=f"model.build = {config.build!r}")
    return lambda: function(**arguments)


def load_loss(config: AnyModelConfig) -> Callable[..., Any] | None:
    """The user's own loss, or None when the recipe names none.

    Raises:
        RequestError: it cannot be imported.
    """
    return None if config.loss is None else load_function(config.loss, key="model.loss")
