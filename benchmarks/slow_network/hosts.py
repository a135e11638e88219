"""Two hosts on one machine with a cable of a given speed between them: network namespaces. Needs root; removes what it made."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "eth"
ADDRESSES = ("10.87.0.1", "10.87.0.2")


HEADER_BYTES = 14 + 20 + 32
"""Of a packet: Ethernet, IPv4, and TCP with time stamps. The counters of an interface have one of each for every packet."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What an interface has sent."""

    num_bytes: int
    packets: int

    def since(self, before: "Sent") -> "Sent":
        """What was sent after an earlier look."""
        return Sent(num_bytes=self.num_bytes - before.num_bytes, packets=self.packets - before.packets)

    @property
    def payload(self) -> int:
        """Without headers."""
        return self.num_bytes - HEADER_BYTES * self.packets


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Names of the two namespaces; the first has the first address."""

    names: tuple[str, str]

    def enter(self, host: int) -> list[str]:
        """Before a command that is to run on a host. Processes of one host do not see those of the other, so that ranks cannot
        share memory either."""
        return [
            *("ip", "netns", "exec", self.names[host]),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        ]

    def limit(self, rate: str | None) -> None:
        """What either end of the cable may send from now on, such as ``100mbit``; None for as much as goes."""
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"], capture_output=True)
            if rate is not None:
                _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, *_BUCKET)

    def sent(self) -> list[Sent]:
        """What the interface of each host has sent since it was made."""
        folder = f"/sys/class/net/{DEVICE}/statistics"
        paths = (f"{folder}/tx_bytes", f"{folder}/tx_packets")
        found = [_run("ip", "netns", "exec", name, "cat", *paths).split() for name in self.names]
        return [Sent(num_bytes=int(size), packets=int(packets)) for size, packets in found]


_BUCKET = ("burst", "64kb", "latency", "100ms")


def why_not() -> str | None:
    """What is missing here for two hosts; None for nothing."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root")
    return f"network namespaces need root, iproute2 and unshare; missing: {', '.join(missing)}" if missing else None


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Hosts with an unlimited cable between them.

    Raises:
        SystemExit: they cannot be made; says why.
    """
    names = (f"slow{os.getpid()}a", f"slow{os.getpid()}b")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        first, second = names
        _run("ip", "-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
        yield Hosts(names=names)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(words)}: {error.stderr.strip()}") from error
