"""The options that name the hosts of a run, for every verb that starts one."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.launch.hosts.coordinator import Fleet
    from shoal.launch.hosts.hostspec import HostSlots

Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="A:2,B:2", help="Run on these hosts, with so many processes on each, over ssh."),
]
Hostfile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="The hosts, one in each line, as 'name slots=2'.")
]
Shell = Annotated[
    str | None, typer.Option("--ssh", metavar="COMMAND", help="The remote shell; by default ssh, which asks nothing.")
]
Python = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="The interpreter on the hosts; by default this one's path."),
]
Network = Annotated[
    str | None,
    typer.Option("--network", metavar="NET", help="Over which hosts talk: an interface, or such as 10.0.0.0/24."),
]


def read_hosts(hosts: str | None, hostfile: Path | None) -> "tuple[HostSlots, ...]":
    """The hosts that were named; none where nobody named any.

    Raises:
        RequestError: they are named twice, or are none.
    """
    from shoal.launch.hosts.hostspec import parse_hosts, read_hostfile

    if hosts is not None and hostfile is not None:
        raise RequestError(f"--hosts {hosts} and --hostfile {hostfile} both name the hosts; give one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile is not None else ()


def check_options(hosts: "tuple[HostSlots, ...]", *, nproc: int | None, **others: str | None) -> None:
    """Refuse options that do not go with hosts, or not without.

    Raises:
        RequestError: names them.
    """
    given = [f"--{name}" for name, value in others.items() if value is not None]
    if not hosts and given:
        raise RequestError(
            f"{', '.join(given)} says how to get to hosts, and none is named; add --hosts, or leave it out"
        )
    if hosts and nproc is not None:
        raise RequestError(
            f"--nproc {nproc} beside --hosts: say how many run on each host, as in {hosts[0].name}:{nproc}"
        )


def build_fleet(
    hosts: "tuple[HostSlots, ...]",
    *,
    remote: str | None,
    python: str | None,
    network: str | None,
    most_per_core: int = 0,
) -> "Fleet":
    """The hosts, and how to get there.

    Raises:
        RequestError: the remote shell is no command.
    """
    from shoal.launch.hosts.coordinator import DEFAULT_SHELL, Fleet

    try:
        words = tuple(shlex.split(remote)) if remote is not None else DEFAULT_SHELL
    except ValueError as error:
        raise RequestError(f"--ssh {remote!r} is no command: {error}") from error
    if not words:
        raise RequestError("--ssh is empty; name a command that is called with a host and a command, as ssh is")
    return Fleet(
        hosts=hosts, remote_shell=words, python=python or "", network=network or "", most_per_core=most_per_core
    )
