"""Closing the doors that torch leaves open: a gloo group's listening sockets, once all its ranks are connected.

gloo listens on a TCP port for every group and goes on listening for as long as the group lives, although nobody is to come any
more; it has no unix sockets and asks nobody who he is. Whoever can reach the port, on one machine every user of it, could fill a
rank's table of descriptors with connections. gloo has no switch for this, and closing its socket would end its thread, so the
kernel drops every packet that arrives there. Linux only; elsewhere the ports stay open.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from shoal.comm.packetfilter import CAN_DROP, borrowed_socket, drop_everybody


@contextlib.contextmanager
def sealed_listeners() -> Iterator[None]:
    """Seal every TCP socket of this process that began to listen inside the ``with`` block, whichever thread opened it.

    Where gloo was told to connect at the first collective (``TORCH_GLOO_LAZY_INIT``), its peers are still to come, and nothing is
    sealed.
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("", "0", "n", "no", "f", "false", "off"):
        yield
        return
    before = _listening_sockets()
    yield
    for descriptor, _ in _listening_sockets() - before:
        # A kernel without such filters (some sandboxes have none) leaves the port open, as other systems do; the run goes on.
        with contextlib.suppress(OSError):
            drop_everybody(descriptor)


def _listening_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of every TCP socket on which this process listens."""
    found = set()
    for name in os.listdir("/proc/self/fd") if CAN_DROP else ():
        # A descriptor may be closed meanwhile, that of the listing itself always.
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _is_listening(int(name)):
                found.add((int(name), status.st_ino))
    return found


def _is_listening(descriptor: int) -> bool:
    with borrowed_socket(descriptor) as borrowed:
        is_tcp = borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_STREAM
        return is_tcp and borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
