"""What the kernel drops before it reaches a listening socket that a library has opened and gives no hold on.

A classic packet filter (``SO_ATTACH_FILTER``) on a listening TCP socket decides who may connect; any user may attach one to a
socket of their own, and connections that exist are not touched. Linux only.

gloo listens on a TCP port for every group and goes on listening for as long as the group lives, although no rank is to come any
more; it has no unix sockets and no authentication. Everybody who can reach the port, on one machine every user of it, could
fill a rank's table of descriptors with connections. gloo has no switch for this, and closing its socket would end its thread,
so the kernel drops every packet that arrives there once all ranks of the group are connected. Elsewhere than on Linux the ports
stay open.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Sequence

CAN_DROP = sys.platform == "linux"
MOST_ADDRESSES = 64
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# Of the classic filter's instructions: load a word of the packet, compare it, end with so many bytes of the packet kept.
_LOAD, _EQUALS, _KEEP = 0x20, 0x15, 0x06
_SOURCE = 0xFFF00000 + 12
"""Where the kernel's filter finds the sender's address: 12 bytes into the IPv4 header (``SKF_NET_OFF``)."""
_ALL = 0xFFFFFFFF


def drop_everybody(descriptor: int) -> None:
    """Let nobody connect to a listening socket any more."""
    _attach(descriptor, [(_KEEP, 0, 0, 0)])


def drop_addresses(descriptor: int, addresses: Sequence[str]) -> None:
    """Refuse connections from these IPv4 addresses, at most ``MOST_ADDRESSES``; with none, every address may connect again."""
    if not addresses:
        with borrowed_socket(descriptor) as borrowed, contextlib.suppress(OSError):
            borrowed.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    numbers = [int(ipaddress.IPv4Address(address)) for address in addresses]
    program = [(_LOAD, 0, 0, _SOURCE)]
    # To the last instruction, past the comparisons that follow and the one before it.
    program += [(_EQUALS, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    _attach(descriptor, [*program, (_KEEP, 0, 0, _ALL), (_KEEP, 0, 0, 0)])


@contextlib.contextmanager
def borrowed_socket(descriptor: int) -> Iterator[socket.socket]:
    """A socket object over a descriptor whose owner closes it.

    Raises:
        OSError: it is not a socket (any more).
    """
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _attach(descriptor: int, program: Sequence[tuple[int, int, int, int]]) -> None:
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(packed, len(packed))
    with borrowed_socket(descriptor) as borrowed:
        described = struct.pack("HP", len(program), ctypes.addressof(instructions))
        borrowed.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


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
