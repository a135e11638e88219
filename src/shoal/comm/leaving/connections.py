"""The connections of gloo's groups, shut down by a rank that leaves them so that nobody waits for it there.

A rank that waits in a collective of gloo ends when a connection does. gloo closes its own when nothing refers to the group any
more: DDP's reducer, a hook or the traceback of the very exception may refer to it for long, and ``abort`` of gloo's groups does
nothing. So what was opened while a group was made is noted, and shut down by number. Linux only; elsewhere the others wait until
the group is collected as garbage.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from shoal.comm.packetfilter import CAN_DROP, borrowed_socket

Connection = tuple[int, int]
"""A descriptor and the inode behind it: the number may be another file's later."""

_NOTED: set[Connection] = set()


@contextlib.contextmanager
def noted_connections() -> Iterator[None]:
    """Note every TCP connection of this process that was opened inside; shut them down again if the ``with`` block fails."""
    before = list_connections()
    try:
        yield
    except BaseException:
        shut(list_connections() - before)
        raise
    _NOTED.update(list_connections() - before)


def shut_connections() -> None:
    """End every connection that was noted: whoever waits at its other end, or here in another thread, gets an error at once."""
    shut(_NOTED)
    _NOTED.clear()


def shut(connections: set[Connection]) -> None:
    """End connections, for both ends."""
    for descriptor, inode in connections:
        # It may be closed by now, or have ended at the other end.
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                with borrowed_socket(descriptor) as borrowed:
                    borrowed.shutdown(socket.SHUT_RDWR)


def list_connections() -> set[Connection]:
    """The TCP connections of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd") if CAN_DROP else ():
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _is_connected(int(name)):
                found.add((int(name), status.st_ino))
    return found


def _is_connected(descriptor: int) -> bool:
    with borrowed_socket(descriptor) as borrowed:
        is_tcp = borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_STREAM
        # A socket that listens has no peer, which is an error.
        return is_tcp and bool(borrowed.getpeername())
