"""The function that ``data.build`` names. No torch: the command line checks the name before it starts anything."""

from collections.abc import Callable
from typing import Any

from shoal.core.functions import bind_arguments, load_function
from shoal.data.config import OwnDataConfig


def load_build(config: OwnDataConfig) -> Callable[[], Any]:
    """The user's function with its arguments bound, ready to be called.

    Raises:
        RequestError: it cannot be imported, or does not take the arguments of the recipe.
    """
    function = load_function(config.build, key="data.build")
    bind_arguments(function, config.args, key=f"data.build = {config.build!r}")
    return lambda: function(**config.args)
