"""A reason to stop waiting for other ranks: they are being assembled anew, and nobody will come to where this one waits.

A wait in shared memory looks here between two naps. Whoever follows the membership of a run says by ``interrupt_when`` how to
find out; in a run whose ranks never change nobody does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_reason: Callable[[], str | None] | None = None
"""A variable of this process, in which one thread computes."""


@contextmanager
def interrupt_when(reason: Callable[[], str | None]) -> Iterator[None]:
    """Inside, waits end as soon as ``reason`` returns one. It is called a few times a second by a rank that waits."""
    global _reason
    before, _reason = _reason, reason
    try:
        yield
    finally:
        _reason = before


def reason_to_stop() -> str | None:
    """Why this rank should wait no longer; None while it should."""
    return None if _reason is None else _reason()


def is_interruptible() -> bool:
    """Whether somebody follows the membership of this rank's run."""
    return _reason is not None
