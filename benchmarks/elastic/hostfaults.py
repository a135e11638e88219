"""Faults of hosts for the benchmark of elastic runs: hosts are network namespaces, whose agents are reached through them."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hosts"))
from namespaces import Hosts  # of the benchmark beside this one

AGENT = "shoal.launch.hosts.agent"


def write_shell(hosts: Hosts, folder: Path) -> Path:
    """A program in the place of ``ssh``: called with a host's address and a command, it runs that on the host."""
    cases = "".join(
        f'  {hosts.address(number)}) set -- {shlex.join(hosts.enter(number))} sh -c "$*" ;;\n'
        for number in range(len(hosts.names))
    )
    program = folder / "rsh"
    program.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}esac\nexec "$@"\n')
    program.chmod(0o755)
    return program


def processes_of(hosts: Hosts, number: int) -> list[psutil.Process]:
    """Every process on a host."""
    space, found = os.stat(f"/run/netns/{hosts.names[number]}").st_ino, []
    for process in psutil.process_iter():
        try:
            if os.stat(f"/proc/{process.pid}/ns/net").st_ino == space:
                found.append(process)
        except OSError:
            continue
    return found


def power_off(hosts: Hosts, number: int) -> None:
    """Take a host's power. Its cable goes first: the kernel ends the connections of processes that are killed, and a host
    without power tells nobody. The line of its agent does not go over that cable here, so the agent is killed when nobody hears
    of it: the others find out by themselves, or by the lease."""
    _set_link(hosts, number, "down")
    agents = _agents(hosts, number)
    for process in agents:
        _send(process, signal.SIGSTOP)
    spared = {process.pid for process in agents}
    for process in processes_of(hosts, number):
        if process.pid not in spared:
            _send(process, signal.SIGKILL)


def power_on(hosts: Hosts, number: int) -> None:
    """Let a host begin again: what was left of it is gone before its cable is back."""
    for process in processes_of(hosts, number):
        _send(process, signal.SIGKILL)
    _set_link(hosts, number, "up")


def cut(hosts: Hosts, number: int) -> None:
    """Pull a host's cable out. Its line to the command does not go over that cable here, so its agent is silenced as well."""
    _set_link(hosts, number, "down")
    for process in _agents(hosts, number):
        _send(process, signal.SIGSTOP)


def mend(hosts: Hosts, number: int) -> None:
    """Put the cable back."""
    _set_link(hosts, number, "up")
    for process in _agents(hosts, number):
        _send(process, signal.SIGCONT)


def _agents(hosts: Hosts, number: int) -> list[psutil.Process]:
    found = []
    for process in processes_of(hosts, number):
        try:
            if AGENT in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def _send(process: psutil.Process, number: int) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return


def _set_link(hosts: Hosts, number: int, state: str) -> None:
    subprocess.run(["ip", "-n", hosts.switch, "link", "set", f"port{number}", state], check=True)
