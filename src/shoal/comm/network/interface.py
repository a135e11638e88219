"""The network interface that leads to the other ranks.

gloo listens where the machine's name leads, and on many machines that is 127.0.1.1, which no other host can reach. The route to
rank 0 says which interface is right: the kernel is asked for it, and no packet is sent.
"""

import os
import socket
import struct
from collections.abc import MutableMapping

from shoal.core.place import Place

VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(place: Place) -> str | None:
    """This host's own address on the route to the other ranks; None where it is not known.

    Rank 0 asks for the route to another host: its own name leads to 127.0.1.1 on many machines, where no other host arrives.
    """
    found = route_to(place.address) if place.address else None
    is_alone = place.local_size == place.world_size or not place.hosts[1:]
    if found is None or not found.startswith("127.") or is_alone:
        return found
    own = socket.gethostname().partition(".")[0]
    others = [host for host in place.hosts if host.partition(".")[0] != own]
    return next((known for host in others if (known := route_to(host)) is not None), found)


def choose_interface(place: Place, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Tell gloo the interface on the route to rank 0, unless the user has; returns its name, or None where gloo chooses."""
    if environment.get(VARIABLE) or not place.address:
        return environment.get(VARIABLE)
    own = own_address(place)
    name = None if own is None else interface_of(own)
    if name is not None:
        environment[VARIABLE] = name
    return name


def route_to(host: str) -> str | None:
    """This machine's own IPv4 address on the route to a host; None where there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The interface with an IPv4 address; Linux only."""
    # All of 127.0.0.0/8 is the loopback interface's, which answers with its first address.
    wanted = "127.0.0.1" if address.startswith("127.") else address
    return next((name for name, found in list_interfaces() if found == wanted), None)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty where it has none, or nobody has said which. Linux only."""
    return next((address for name, address in list_interfaces() if name == interface), "")


def list_interfaces() -> list[tuple[str, str]]:
    """The name and the IPv4 address of every interface that has one; Linux only."""
    try:
        import fcntl
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            except OSError:
                continue  # an interface without an IPv4 address
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found
