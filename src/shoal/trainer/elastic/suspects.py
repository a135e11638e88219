"""Whom a rank of several hosts could not reach when a collective failed, as far as the error tells."""

import os
import re
from collections.abc import Mapping, Sequence

from shoal.comm.interface import list_interfaces

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


def find_suspect(error: BaseException, slots: Mapping[str, int]) -> int | None:
    """The slot of a rank on the host that an error of gloo names; None where it names none."""
    match = _PEER.search(str(error))
    return None if match is None else slots.get(match.group(1))
