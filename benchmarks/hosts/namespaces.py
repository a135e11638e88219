"""Hosts on one machine, with a cable of a given speed from each to a switch: network namespaces. Needs root, cleans up."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "eth"
HEADER_BYTES = 14 + 20 + 32
"""Of a packet: Ethernet, IPv4, and TCP with time stamps. The counters of an interface have one of each for every packet."""
_BUCKET = ("burst", "128kb", "latency", "100ms")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Namespaces on a bridge that lies in another one, so that nothing of them meets the machine's own network."""

    switch: str
    names: tuple[str, ...]

    def address(self, host: int) -> str:
        """Of a host, from which all others can reach it."""
        return f"10.88.0.{host + 1}"

    def enter(self, host: int) -> list[str]:
        """Before a command that is to run on a host, with its further ranks. Processes of one host do not see another's."""
        return [
            *("ip", "netns", "exec", self.names[host]),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        ]

    def limit(self, rate: str | None) -> None:
        """What every host may send and receive from now on, such as ``100mbit``; None for as much as goes."""
        for number, name in enumerate(self.names):
            for space, device in ((name, DEVICE), (self.switch, f"port{number}")):
                subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], capture_output=True)
                if rate is not None:
                    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *_BUCKET)

    def sent(self) -> list[int]:
        """Bytes that each host has sent since it was made, without headers."""
        return [size - HEADER_BYTES * packets for size, packets in self._counted()]

    def on_the_cable(self) -> list[int]:
        """The same with headers, which the cable carries too."""
        return [size for size, _ in self._counted()]

    def _counted(self) -> list[tuple[int, int]]:
        folder = f"/sys/class/net/{DEVICE}/statistics"
        paths = (f"{folder}/tx_bytes", f"{folder}/tx_packets")
        found = [_run("ip", "netns", "exec", name, "cat", *paths).split() for name in self.names]
        return [(int(size), int(packets)) for size, packets in found]


def why_not() -> str | None:
    """What is missing here for hosts; None for nothing."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root")
    return f"network namespaces need root, iproute2 and unshare; missing: {', '.join(missing)}" if missing else None


@contextmanager
def made_hosts(count: int) -> Iterator[Hosts]:
    """Hosts with unlimited cables.

    Raises:
        SystemExit: they cannot be made; says why.
    """
    tag = f"ho{os.getpid()}"
    hosts = Hosts(switch=f"{tag}s", names=tuple(f"{tag}h{number}" for number in range(count)))
    made: list[str] = []
    try:
        for name in (hosts.switch, *hosts.names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", hosts.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hosts.switch, "link", "set", "bridge", "up")
        for number, name in enumerate(hosts.names):
            port = f"port{number}"
            _run("ip", "-n", hosts.switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
            _run("ip", "-n", hosts.switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{hosts.address(number)}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(words)}: {error.stderr.strip()}") from error
