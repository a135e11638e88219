"""Whom a rank of several hosts could not reach when a collective failed, as far as the error tells."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.comm.interface import list_interfaces

_PROBE_SECONDS = 1.0
_CLOSED_PORT = 1
"""A host that is there refuses a connection to a port on which nobody listens; one that cannot be reached does not answer."""
_MOST_PROBES = 32
_PEER = re.compile(r"\[(?:::ffff:)?([0-9]{1,3}(?:\.[0-9]{1,3}){3})\]")


def own_ip() -> str:
    """The address of the interface by which gloo talks; empty where nobody has said which."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return next((address for interface, address in list_interfaces() if interface == name), "")


def addresses_of(told: Sequence[str], slots: Sequence[int]) -> dict[str, int]:
    """By address, a slot of the host that has it, given the address and the slot of every rank."""
    found: dict[str, int] = {}
    for address, slot in zip(told, slots, strict=True):
        if address:
            found.setdefault(address, slot)
    # Hosts on one machine share their address, and nobody can be told from another.
    return found if len(found) > 1 else {}


def find_suspect(error: BaseException, slots: Mapping[str, int], *, own: str = "") -> int | None:
    """The slot of a rank on a host that could not be reached: the one that an error of gloo names, or the first that does not
    answer now; None where nobody can tell.

    Args:
        error: of the collective.
        slots: by address, of the ranks of the view.
        own: this host's address.
    """
    match = _PEER.search(str(error))
    if match is not None and match.group(1) in slots:
        return slots[match.group(1)]
    others = [address for address in slots if address != own][:_MOST_PROBES]
    if not others:
        return None
    with ThreadPoolExecutor(len(others)) as pool:
        answers = list(pool.map(_answers, others))
    return next((slots[address] for address, is_there in zip(others, answers, strict=True) if not is_there), None)


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, _CLOSED_PORT), timeout=_PROBE_SECONDS).close()
    except TimeoutError:
        return False
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True
