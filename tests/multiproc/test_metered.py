"""What the traffic counter says crossed between two hosts is what their interfaces say, but for headers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.processes.command import ROOT, SUPPORT
from support.processes.network_namespaces import Network, built_network

ADDRESSES = {"a": "10.83.0.1", "b": "10.83.0.2"}
HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with time stamps: an interface counts one of each for every packet."""
ALLOWED, WORDS = 0.01, 4096
"""A share, and so many bytes a step: gloo's own words to its peers."""
STEPS = 4
PLANS = (
    "dp=2",
    "dp=2 sync=diloco:2",
    "dp=2 sync=stream:4,2,1",
    "dp=2 sync=gossip:complete",
    "dp=2 compress=int8",
    "dp=2 compress=powersgd:2",
    "dp=2 compress=topk:0.05",
    "dp=2 zero=2 compress=int4",
    "dp=2 sync=diloco:2 compress=int4",
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@contextmanager
def started(network: Network, plan: str) -> Iterator[list[subprocess.Popen]]:
    """A rank on each host; processes of one do not see those of the other, so that they cannot share memory."""
    ranks = []
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES["a"], "MASTER_PORT": "29500"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth", "LOCAL_RANK": "0"}
    shared |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    try:
        for rank, host in enumerate(ADDRESSES):
            command = [*network.enter(host), *apart, sys.executable, str(SUPPORT / "processes/metered_rank.py"), plan]
            environment = {**shared, "RANK": str(rank)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, env=environment, **pipes))
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


def take(ranks: list[subprocess.Popen], steps: int) -> list[dict[str, list[int]]]:
    for rank in ranks:
        rank.stdin.write(f"{steps}\n")
        rank.stdin.flush()
    return [json.loads(rank.stdout.readline() or "null") for rank in ranks]


def payload(network: Network, host: str) -> int:
    """What a host has sent so far, without headers."""
    folder = "/sys/class/net/eth/statistics"
    words = [*network.enter(host), "cat", f"{folder}/tx_bytes", f"{folder}/tx_packets"]
    size, packets = map(int, subprocess.run(words, capture_output=True, check=True).stdout.split())
    return size - HEADER_BYTES * packets


def sent(counted: dict[str, list[int]], plan: str) -> int:
    """What one of two ranks sends for what was counted: all of a sum's tensor, half of what is exchanged or gathered."""
    total = 0
    for key, (_, num_bytes) in counted.items():
        # Gossip counts what goes to neighbours; elsewhere a rank's part for itself is counted and goes nowhere.
        is_whole = key.split()[1] in ("all_reduce", "all_reduce_max") or "gossip" in plan
        total += num_bytes if is_whole else num_bytes // 2
    return total


@pytest.mark.parametrize("plan", PLANS)
def test_the_counted_bytes_cross_between_two_hosts(plan: str):
    with built_network(ADDRESSES) as network, started(network, plan) as ranks:
        take(ranks, STEPS)  # Connections are made, and what every rank must have at the start has been sent.
        before = [payload(network, host) for host in ADDRESSES]
        counted = take(ranks, STEPS)
        after = [payload(network, host) for host in ADDRESSES]
    assert None not in counted, "a rank failed"
    for place, rank in enumerate(counted):
        crossed, expected = after[place] - before[place], sent(rank, plan)
        assert expected > 10 * WORDS * STEPS, "too little to tell"
        assert abs(crossed - expected) <= ALLOWED * expected + WORDS * STEPS, f"rank {place}: {crossed}, counted {rank}"
