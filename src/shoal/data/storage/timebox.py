"""A call of a library that has no deadline of its own, ended by ours."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.data.storage.attempts import Transient

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What the call returns or raises, if it does within so many seconds.

    A call that does not is left to its thread, which ends with the process; nobody looks at what it returns.

    Raises:
        Transient: it did not end.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="storage call")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise Transient(f"no answer within {seconds:g} s")
    found: Result = outcome[0]
    return found
