"""The proof that plans compute what one process computes; `shoal.verify(...)` is its function.

The room and the function have one name. A room that is imported becomes an attribute of the package and would hide the function,
so the room itself can be called.
"""

import importlib
import sys
import types
from typing import Any


class _CallableRoom(types.ModuleType):
    """This room as a function: ``session.verify``, which imports torch when it is called and not before."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module(f"{__name__}.session").verify(*args, **options)


sys.modules[__name__].__class__ = _CallableRoom
