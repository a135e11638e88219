"""Ends waits inside gloo that nothing else ends: when a host loses its cable, its sockets stay open and nobody speaks on them.

gloo has no way to break off a collective, but it fails every wait on a connection that ends. So when ranks are to be assembled
anew, the connections of the old groups are shut down: those that this process opened while its groups were built. Linux only.
"""

import threading
from collections.abc import Callable

from shoal.comm.leaving.connections import Connection, list_connections, shut

_LOOK_SECONDS = 0.05


class HangUp:
    """A thread that ends this process's connections to other ranks as soon as there is a reason to, once.

    Args:
        reason: called a few times a second, from that thread; true when nobody will come to where this process waits.
    """

    def __init__(self, reason: Callable[[], bool]) -> None:
        self._reason = reason
        self._before = list_connections()
        self._known: set[Connection] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-up", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """All groups are built: what is opened from now on is somebody else's."""
        self._known = list_connections() - self._before

    def close(self) -> None:
        """Watch no more. May be called twice."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            if self._reason():
                found = list_connections()
                shut(found - self._before if self._known is None else found & self._known)
                if self._known is not None:
                    return
