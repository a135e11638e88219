"""The hosts that a user names, and which ranks run on which: ``a:2,b:2``, or a file with a host in each line. Pure."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import RequestError

_HOST = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*@)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_LINE = re.compile(r"(?P<host>[^\s:]+)(:(?P<count>\S+)|\s+(slots|max_slots)=(?P<slots>\S+))?")


@dataclass(frozen=True, kw_only=True)
class HostSlots:
    """A host, and how many ranks run there."""

    name: str
    """As the remote shell takes it: a name, an address, or an alias of its configuration, with a user before an ``@``."""
    slots: int = 0
    """0 where the user named no number."""


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """The hosts of ``a:2,b:2``, or of ``a,b``.

    Raises:
        RequestError: a part is no host, a host is named twice, or some have a number and some have none.
    """
    return _checked([_parse(part.strip(), f"--hosts {text}") for part in text.split(",")], f"--hosts {text}")


def read_hostfile(path: Path) -> tuple[HostSlots, ...]:
    """The hosts of a file: ``name``, ``name:2`` or ``name slots=2`` in each line; ``#`` begins a comment.

    Raises:
        RequestError: it cannot be read, or a line is no host; see ``parse_hosts``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the host file {path}: {error}") from error
    words = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    hosts = [_parse(text, f"{path}, line {number}") for number, text in words if text]
    if not hosts:
        raise RequestError(f"the host file {path} names no host; write one in each line, such as `node1 slots=2`")
    return _checked(hosts, str(path))


def place_ranks(hosts: Sequence[HostSlots], num_ranks: int, *, has_more: bool = False) -> tuple[HostSlots, ...]:
    """The hosts with the number of ranks on each, in their order; ranks are numbered host by host.

    Args:
        hosts: as the user named them.
        num_ranks: ranks at the start.
        has_more: they may have room for more ranks than there are at the start.

    Raises:
        RequestError: the hosts have room for another number of ranks than the plan has.
    """
    named = " ".join(f"{host.name}:{host.slots}" if host.slots else host.name for host in hosts)
    if hosts[0].slots:
        room = sum(host.slots for host in hosts)
        if room != num_ranks and not (has_more and room > num_ranks):
            raise RequestError(
                f"the plan has {num_ranks} ranks, and the hosts {named} have room for {room}; name a plan with {room} ranks "
                "(--plan), or other numbers behind the hosts"
            )
        return tuple(hosts)
    if num_ranks < len(hosts):
        raise RequestError(
            f"the plan has {num_ranks} rank(s), and {len(hosts)} hosts are named ({named}): leave {len(hosts) - num_ranks} of "
            "them out, or name a plan with more ranks (--plan)"
        )
    if num_ranks % len(hosts):
        raise RequestError(
            f"{num_ranks} ranks cannot be spread evenly over the {len(hosts)} hosts {named}; say how many run on each, as in "
            f"{hosts[0].name}:{num_ranks - len(hosts) + 1}"
        )
    return tuple(HostSlots(name=host.name, slots=num_ranks // len(hosts)) for host in hosts)


def hosts_behind(hosts: Sequence[HostSlots], num_ranks: int) -> frozenset[str]:
    """The hosts that have none of the first so many ranks."""
    firsts = [sum(host.slots for host in hosts[:place]) for place in range(len(hosts))]
    return frozenset(host.name for host, first in zip(hosts, firsts, strict=True) if first >= num_ranks)


def choose_host(
    old: HostSlots, named: Sequence[HostSlots], present: Collection[str], *, tried: int
) -> HostSlots | None:
    """Who is to take the place of a host that was lost: itself, or one that is new among those that are named now, in turn.

    Args:
        old: the lost one, with the number of its ranks.
        named: those that the host file has now.
        present: the names of those that are there, or on their way.
        tried: how often somebody was tried for this place before.

    Returns:
        The host; None where the lost one is not named any more and nobody is new.
    """
    again = [old] if any(host.name == old.name for host in named) else []
    new = [
        HostSlots(name=host.name, slots=old.slots)
        for host in named
        if host.name != old.name and host.name not in present and (not host.slots or host.slots >= old.slots)
    ]
    found = again + new
    return found[tried % len(found)] if found else None


def describe_hosts(hosts: Sequence[HostSlots]) -> str:
    """Hosts in words."""
    return ", ".join(f"{host.name}:{host.slots}" for host in hosts)


def _parse(text: str, where: str) -> HostSlots:
    match = _LINE.fullmatch(text)
    if match is None or not _HOST.fullmatch(match["host"]):
        raise RequestError(
            f"{where}: {text!r} is no host; write names or addresses with a number of ranks, as in a:2,b:2"
        )
    count = match["count"] or match["slots"]
    if count is not None and (not count.isascii() or not count.isdigit() or not 0 < int(count) < 1 << 16):
        raise RequestError(f"{where}: {count!r} is no number of ranks on {match['host']}; write {match['host']}:2")
    return HostSlots(name=match["host"], slots=int(count) if count is not None else 0)


def _checked(hosts: Sequence[HostSlots], where: str) -> tuple[HostSlots, ...]:
    names = [host.name.rpartition("@")[2] for host in hosts]
    for name in names:
        if (times := names.count(name)) > 1:
            raise RequestError(
                f"{where} names {name} {times} times; name each host once, with all its ranks: {name}:{times}"
            )
    without = [host.name for host in hosts if not host.slots]
    if without and len(without) < len(hosts):
        raise RequestError(
            f"{where}: {', '.join(without)} has no number of ranks and others have; give each one, or none"
        )
    return tuple(hosts)
