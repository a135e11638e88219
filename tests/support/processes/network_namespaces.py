"""Machines played by network namespaces on one bridge: each has an address of its own, and its link can be taken down."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Namespaces on a bridge in another one; taking a link down cuts one off.

    Args:
        hosts: addresses by name.
    """

    def __init__(self, hosts: Mapping[str, str]) -> None:
        tag = f"p{os.getpid() % 100000}"
        self.hosts = dict(hosts)
        self.hub = f"{tag}h"
        self.spaces = {name: f"{tag}{name}" for name in hosts}
        self.made: list[str] = []

    def build(self) -> None:
        for space in (self.hub, *self.spaces.values()):
            ip("netns", "add", space)
            self.made.append(space)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for name, space in self.spaces.items():
            ip("-n", self.hub, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth", "netns", space)
            ip("-n", self.hub, "link", "set", f"to-{name}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{self.hosts[name]}/24", "dev", "eth")
            ip("-n", space, "link", "set", "eth", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def set_link(self, name: str, state: str) -> float:
        ip("-n", self.hub, "link", "set", f"to-{name}", state)
        return time.monotonic()

    def enter(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.spaces[name])

    def remove(self) -> None:
        for space in self.made:
            ip("netns", "del", space)


@contextmanager
def built_network(hosts: Mapping[str, str]) -> Iterator[Network]:
    """Skips where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    made = Network(hosts)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
        yield made
    finally:
        made.remove()
