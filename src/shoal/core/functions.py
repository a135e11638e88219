"""Functions that a recipe names: ``build = "package.module:function"``.

The model, its loss and the data can all be the user's own, so the import lives here, below the rooms that need it. Importing
runs the user's code: whatever it raises becomes one message with the line that raised it, because a traceback through
``importlib`` hides it.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.errors import RequestError, ShoalError, did_you_mean


def load_function(text: str, *, key: str = "build") -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the current folder can be imported from.

    Args:
        text: what the recipe says.
        key: the recipe key that said it, for messages.

    Raises:
        RequestError: the text has another form, the import fails (with its line), or there is no such function.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise RequestError(f"{key} = {text!r} is not package.module:function, such as mymodel:build")
    folder = os.getcwd()
    # A console script, unlike `python -m`, does not have the current folder on its path.
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    module = _import(module_name, text, key, folder)
    found = getattr(module, name, None)
    if found is None:
        functions = [entry for entry, value in vars(module).items() if callable(value) and not entry.startswith("_")]
        advice = did_you_mean(name, functions) if functions else "it defines no function"
        raise RequestError(f"{key} = {text!r}: module {module_name!r} has no {name!r}; {advice}")
    if not callable(found):
        raise RequestError(f"{key} = {text!r}: {name!r} is a {type(found).__name__}, not a function; name a function")
    return found  # type: ignore[no-any-return]


def bind_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], *, key: str) -> None:
    """Refuse arguments that the function does not take, before it is called.

    Raises:
        RequestError: says which argument is wrong, and what the function takes.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # Written in C without a signature: nothing can be said before the call.
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise RequestError(f"{key}: {error}; the function is {name}{signature}, give its arguments in args") from None


def call_own(
    function: Callable[[], Any],
    *,
    what: str,
    is_excused: Callable[[Exception], bool] | None = None,
    refusal: type[ShoalError] = RequestError,
) -> Any:
    """What the user's own function returns; whatever it raises becomes one message, with the line of theirs that raised it.

    Args:
        function: ready to be called.
        what: the recipe key and what it says, for messages.
        is_excused: true for errors that are not the function's fault, such as a machine without memory; they pass as they are.
        refusal: what its error becomes: a wrong request before a run, and in one a failed run.

    Raises:
        ShoalError: it failed; of the kind ``refusal``, caused by its own error.
    """
    try:
        return function()
    except ShoalError:
        raise
    except Exception as error:  # It may raise anything.
        if is_excused is not None and is_excused(error):
            raise
        raise refusal(f"{what} failed: {type(error).__name__}: {error}{place_of(error)}") from error


def place_of(error: BaseException) -> str:
    """Where the user's own code was when an error came, as `` (file:line)``; a library's line where there is none of theirs."""
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (own or frames)[-1:]
    return f" ({last[0].filename}:{last[0].lineno})" if last else ""


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """True when the function declares a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        return False


def _import(module_name: str, text: str, key: str, folder: str) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise RequestError(
                f"{key} = {text!r}: there is no module {missing!r} in {folder} or among the installed packages; "
                f"start the command in the folder that holds it, or install it"
            ) from None
        raise RequestError(_describe(error, text, key)) from error
    except SyntaxError as error:
        raise RequestError(
            f"{key} = {text!r}: {error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
        ) from error
    except (
        Exception
    ) as error:  # The user's module may raise anything while it is imported; all of it is a wrong request.
        raise RequestError(_describe(error, text, key)) from error


def _describe(error: Exception, text: str, key: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    last = frames[-1] if frames and frames[-1].filename != __file__ else None
    where = f"{last.filename}, line {last.lineno}: " if last is not None else ""
    return f"{key} = {text!r} cannot be imported: {where}{type(error).__name__}: {error}"
