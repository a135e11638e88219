"""A stand-in for ssh on loopback: called with a host and a command as ssh is, it runs the command on this machine."""

import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.launch.hosts.coordinator import Fleet
from shoal.launch.hosts.hostspec import HostSlots

SCRIPT = """#!/bin/sh
# {folder}/HOST.down: there is no such host; {folder}/HOST.env: variables that differ there; {folder}/HOST.stays: a process
# that has the standard error lives on when the shell has ended, as with ssh and ControlPersist
host=$1; shift
if [ -e "{folder}/$host.down" ]; then echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; fi
if [ -e "{folder}/$host.stays" ]; then setsid -f sleep 20 </dev/null >/dev/null; fi
[ -e "{folder}/$host.env" ] && . "{folder}/$host.env"
echo "a login script talks"
echo $$ > "{folder}/$host.pid"
exec sh -c "$*"
"""


def make_shell(folder: Path) -> str:
    path = folder / "remote-shell"
    path.write_text(SCRIPT.format(folder=folder))
    path.chmod(0o755)
    return str(path)


def make_fleet(folder: Path, hosts: Mapping[str, int], **options: object) -> Fleet:
    slots = tuple(HostSlots(name=name, slots=count) for name, count in hosts.items())
    return Fleet(hosts=slots, remote_shell=(make_shell(folder),), **{"python": sys.executable, **options})  # type: ignore[arg-type]


def agent_pid(folder: Path, host: str) -> int:
    """The agent of a host: the shell has become it."""
    return int((folder / f"{host}.pid").read_text())
