"""Whom a rank of several hosts could not reach when a collective failed, as far as the error tells."""

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.comm.network.interface import VARIABLE, address_of

_PROBE_SECONDS = 1.0
_CLOSED_PORT = 1
"""A host that is there refuses a connection to a port on which nobody listens; one that cannot be reached does not answer."""
_MOST_PROBES = 32
_PEER = re.compile(r"\[(?:::ffff:)?([0-9]{1,3}(?:\.[0-9]{1,3}){3})\]")


def own_ip() -> str:
    """The address of the interface by which gloo talks; empty where nobody has said which."""
    return address_of(os.environ.get(VARIABLE, ""))


def addresses_of(told: Sequence[str], slots: Sequence[int]) -> dict[str, int]:
    """By address, a slot of the host that has it, given the address and the slot of every rank."""
    found: dict[str, int] = {}
    for address, slot in zip(told, slots, strict=True):
        if address:
            found.setdefault(address, slot)
    # Hosts on one machine share their address, and nobody can be told from another.
    return found if len(found) > 1 else {}


class Answering:
    """The hosts that answered while all was well. One that drops what it does not expect, as firewalls do, never answers, and its
    silence says nothing later."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self._asked: set[str] = set()

    def learn(self, addresses: Collection[str], *, own: str) -> None:
        """Ask those that were not asked before. Called when the ranks of a view have just connected."""
        new = [address for address in addresses if address != own and address not in self._asked][:_MOST_PROBES]
        self._asked.update(new)
        self.addresses.update(address for address, is_there in _ask(new).items() if is_there)


def find_suspect(
    error: BaseException, slots: Mapping[str, int], *, own: str = "", answering: Collection[str] = ()
) -> int | None:
    """The slot of a rank on a host that could not be reached: one that answered before and does not now, or else the one that an
    error of gloo names; None where nobody can tell.

    A name in an error alone is weak: whoever notices a fault first ends its connections, and the others are told that it did.

    Args:
        error: of the collective.
        slots: by address, of the ranks of the view.
        own: this host's address.
        answering: the addresses that answered while all was well.
    """
    match = _PEER.search(str(error))
    named = match.group(1) if match is not None and match.group(1) in slots else ""
    others = [address for address in slots if address != own and address in answering]
    silent = [address for address, is_there in _ask(others[:_MOST_PROBES]).items() if not is_there]
    if silent and named not in silent:
        named = silent[0]
    return slots.get(named)


def _ask(addresses: Sequence[str]) -> dict[str, bool]:
    """Whether each of these hosts answers now."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as pool:
        return dict(zip(addresses, pool.map(_answers, addresses), strict=True))


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, _CLOSED_PORT), timeout=_PROBE_SECONDS).close()
    except TimeoutError:
        return False
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True
