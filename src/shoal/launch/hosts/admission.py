"""What the hosts of a run must have in common before a rank starts, and the address by which each is reached. Pure."""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.core.errors import RequestError
from shoal.launch.hosts.messages import Entered, Hello, Interface

_FIXES = {
    "shoal": "install one version of Shoal on all hosts",
    "code": "install the same Shoal on all hosts: the version is the same, the files are not",
    "torch": "install one version of torch on all hosts",
    "python": "use one Python on all hosts (--python names it)",
}


def version_problems(hellos: Mapping[str, Hello]) -> list[str]:
    """In what hosts differ from the first, with the fix; empty when they fit together."""
    (first, standard), *others = hellos.items()
    found = []
    for host, hello in others:
        for name, fix in _FIXES.items():
            theirs, ours = getattr(hello, name), getattr(standard, name)
            if theirs != ours:
                found.append(f"host {host} has {name} {theirs} and host {first} has {ours}: {fix}")
                break
    return found


def same_machine_problems(hellos: Mapping[str, Hello], names: Sequence[str]) -> list[str]:
    """Two names for one machine would have it run twice what it was meant to; loopback names are for tests and are let be."""
    addresses: dict[frozenset[str], str] = {}
    found = []
    for host in names:
        own = frozenset(one.address for one in hellos[host].interfaces if not one.address.startswith("127."))
        if own and own in addresses and not is_loopback_name(host):
            found.append(
                f"hosts {addresses[own]} and {host} are one machine ({', '.join(sorted(own))}); name it once, with all its ranks"
            )
        addresses.setdefault(own, host)
    return found


def folder_problems(
    run_dir: str, token: str, entered: Mapping[str, Entered], *, first: str, why_shared: str = ""
) -> list[str]:
    """On which hosts the run directory cannot be used. The first host's must be the coordinator's: summary and events of the
    first rank are read there. The others may have one of their own, and ``checkpoint.place`` says where checkpoints go then;
    but not where it has to be shared, because any of them may become the first."""
    problems = [
        f"host {host}: {run_dir} cannot be used: {answer.problem}; use a --run-dir that every host can write to"
        for host, answer in entered.items()
        if answer.problem
    ]
    if not problems and entered[first].token != token:
        problems.append(
            f"host {first}, which has rank 0, does not see {run_dir} as it is here: start the command on {first}, name this "
            "machine first, or give a --run-dir on a file system that both share"
        )
    if not problems and why_shared:
        problems += [
            f"host {host} does not share {run_dir} with this machine, and {why_shared}"
            for host, answer in entered.items()
            if answer.token != token
        ]
    return problems


def choose_addresses(
    hellos: Mapping[str, Hello],
    *,
    network: str = "",
    resolve: Callable[[str], Iterable[str]] | None = None,
) -> dict[str, Interface]:
    """The interface of each host by which the other hosts reach it.

    Args:
        hellos: by host.
        network: the name of an interface, or a network such as ``10.0.0.0/24``; left out, the interface that the host's own name
            leads to, or by which the remote shell came in, or the only one.
        resolve: the addresses of a name.

    Raises:
        RequestError: a host has no such interface, or several that could be meant.
    """
    chosen = {
        host: _choose(host, hello, network=network, resolve=resolve or resolved) for host, hello in hellos.items()
    }
    local = [host for host, interface in chosen.items() if interface.address.startswith("127.")]
    if local and len(local) < len(chosen):
        other = next(host for host in chosen if host not in local)
        raise RequestError(
            f"host {local[0]} is only reached over loopback ({chosen[local[0]].address}), and host {other} is at "
            f"{chosen[other].address}: name {local[0]} by an address that {other} can reach, or give --network, such as "
            "--network 10.0.0.0/24"
        )
    return chosen


def is_loopback_name(host: str) -> bool:
    """True for ``localhost`` and addresses of 127.0.0.0/8."""
    name = host.rpartition("@")[2]
    return name == "localhost" or name.startswith("127.")


def resolved(name: str) -> list[str]:
    """The IPv4 addresses of a name, as this machine knows it."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        return []


def _choose(host: str, hello: Hello, *, network: str, resolve: Callable[[str], Iterable[str]]) -> Interface:
    listed = ", ".join(f"{one.name} {one.address}" for one in hello.interfaces) or "none"
    if network:
        fitting = [one for one in hello.interfaces if _is_in(one, network)]
        if len(fitting) != 1:
            raise RequestError(
                f"--network {network} fits {len(fitting)} interfaces of host {host}, which has {listed}; name one that every "
                "host has once"
            )
        return fitting[0]
    name = host.rpartition("@")[2]
    wanted = [name, *resolve(name), hello.shell_address]
    if is_loopback_name(host):
        wanted = ["127.0.0.1"]
    for address in wanted:
        for one in hello.interfaces:
            if one.address == address and (is_loopback_name(host) or not address.startswith("127.")):
                return one
    outward = [one for one in hello.interfaces if not one.address.startswith("127.")]
    if len(outward) != 1:
        raise RequestError(
            f"which interface of host {host} do the other hosts reach? It has {listed}; say so with --network, such as "
            "--network 10.0.0.0/24"
        )
    return outward[0]


def _is_in(interface: Interface, network: str) -> bool:
    if interface.name == network:
        return True
    try:
        return ipaddress.IPv4Address(interface.address) in ipaddress.IPv4Network(network, strict=False)
    except ValueError:
        return False
