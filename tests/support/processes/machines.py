"""Machines for launchers: each a network namespace with an address, a host name, processes and shared memory of its own.

The disk is the same everywhere, as on a cluster with a shared file system. ``words`` run a command on a machine; it ends with it.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.processes.network_namespaces import Network, built_network

_ENTER = """\
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
shift 2
exec "$@"
"""


class Machines:
    """Namespaces that take themselves for machines.

    Args:
        network: with a namespace for each.
        hosts: the file in which they find each other's names.
    """

    def __init__(self, network: Network, hosts: Path) -> None:
        self.network = network
        self._hosts = hosts

    def words(self, name: str) -> list[str]:
        """What stands before a command that runs on a machine."""
        # `ip netns exec` would hide the control groups, which slurmd wants to see.
        new = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["nsenter", f"--net=/run/netns/{self.network.spaces[name]}", *new]
        return [*enter, "sh", "-c", _ENTER, "sh", name, str(self._hosts)]

    def run(self, name: str, command: Sequence[str], **options) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end."""
        return subprocess.run([*self.words(name), *command], capture_output=True, text=True, **options)

    def shell_to(self, folder: Path) -> Path:
        """A program in the place of ``ssh``: called with a host and a command, it runs that there."""
        program = folder / "rsh"
        cases = "".join(f'  {name}) set -- {_quoted(self.words(name))} sh -c "$*" ;;\n' for name in self.network.hosts)
        program.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}esac\nexec "$@"\n')
        program.chmod(0o755)
        return program


@contextmanager
def built_machines(folder: Path, hosts: Mapping[str, str]) -> Iterator[Machines]:
    """Machines by name, with their addresses; skips where there can be none."""
    with built_network(hosts) as network:
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in hosts.items()))
        yield Machines(network, names)


def processes_with(text: str) -> dict[int, dict[str, str]]:
    """The environments of the processes whose command line has a text, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if text in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                found[int(entry.name)] = dict(word.split("=", 1) for word in words if "=" in word)
        except OSError:
            continue
    return found


def kill_rank(text: str, variable: str, rank: int) -> int:
    """Kill the process with this command line to which its launcher gave this number; its process id."""
    (pid,) = [
        pid
        for pid, environment in processes_with(text).items()
        if environment.get(variable) == str(rank) and "--on" not in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]
    os.kill(pid, signal.SIGKILL)
    return pid


def _quoted(words: Sequence[str]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
