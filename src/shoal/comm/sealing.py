"""Closing the doors that torch leaves open: a gloo group's listening sockets, once all its ranks are connected.

gloo listens on a TCP port for every group and goes on listening for as long as the group lives, although nobody is to come any
more; it has no unix sockets and asks nobody who he is. Whoever can reach the port, on one machine every user of it, could fill a
rank's table of descriptors with connections. gloo has no switch for this, and closing its socket would end its thread, so the
kernel is told to drop every packet that arrives for the listening socket. Connections that exist are not touched. Linux only;
elsewhere the ports stay open.
"""

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""One instruction of the classic packet filter: keep 0 bytes of the packet, which drops it."""


@contextlib.contextmanager
def sealed_listeners() -> Iterator[None]:
    """Seal every TCP socket of this process that began to listen inside the ``with`` block."""
    before = _listening_sockets()
    yield
    for descriptor, _ in _listening_sockets() - before:
        _drop_arrivals(descriptor)


def _listening_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of every TCP socket on which this process listens."""
    if sys.platform != "linux":
        return set()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # A descriptor may be closed meanwhile, that of the listing itself always.
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _is_listening(int(name)):
                found.add((int(name), status.st_ino))
    return found


def _is_listening(descriptor: int) -> bool:
    with _borrowed(descriptor) as borrowed:
        is_tcp = borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_STREAM
        return is_tcp and borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def _drop_arrivals(descriptor: int) -> None:
    instruction = ctypes.create_string_buffer(_RETURN_NOTHING)
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    with _borrowed(descriptor) as borrowed:
        borrowed.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object over a descriptor that somebody else closes."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
