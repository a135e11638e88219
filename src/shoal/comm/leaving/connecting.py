"""Connecting to the other ranks of a group of gloo, broken off when there is a reason to (``comm/interruption.py``).

gloo connects the ranks of a group inside its constructor, where it waits for each of them to connect or to listen, and for one
that died until the group's time-out: no connection exists yet that could be ended. So the constructor runs on a thread of its
own, and who waits for it looks around. A thread that nobody waits for any more ends at that time-out by itself; what it has
connected by then is shut down by whoever noted it (``connections.py``).
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d as c10d

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import is_interruptible, reason_to_stop

_LOOK_SECONDS = 0.01


@contextlib.contextmanager
def abortable_connecting() -> Iterator[None]:
    """Inside, groups of gloo that are made end with ``PeerLost`` when there is a reason to stop waiting."""
    if not is_interruptible():
        yield
        return
    original = c10d.ProcessGroupGloo
    # torch has no other place at which a group of its own "gloo" kind, which DDP and others ask for by name, could be made.
    c10d.ProcessGroupGloo = _substitute(original)  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original  # type: ignore[misc]


def _substitute(original: Any) -> Any:
    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **options: Any) -> Any:
            return connect(original, *args, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Kind("ProcessGroupGloo", (original,), {})


def connect(make: Any, *args: Any, **options: Any) -> Any:
    """What ``make`` makes of these, on another thread.

    Raises:
        PeerLost: there is a reason to wait no longer.
    """
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(make(*args, **options))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="connecting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if thread.is_alive() and (reason := reason_to_stop()) is not None:
            raise PeerLost(f"{reason}, so not all ranks connect any more", ranks=[])
    if failure:
        raise failure[0]
    return result[0]
