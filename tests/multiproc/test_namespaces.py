"""Runs over real hosts, which are network namespaces with processes of their own: the bits of one host."""

import os
import subprocess
import sys

import pytest

from support.processes.command import ROOT, SUPPORT
from support.processes.network_namespaces import built_network

ADDRESSES = {"a": "10.83.0.1", "b": "10.83.0.2"}
PLANS = ("dp=4", "dp=4 zero=1", "dp=4 zero=2", "dp=4 zero=3", "dp=2 tp=2 zero=1")
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def trained(network, num_hosts):
    """What four ranks end in and what moved their bytes, by plan, on one host or two of two."""
    per_host = 4 // num_hosts
    shared = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": ADDRESSES["a"], "MASTER_PORT": "29500"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth", "LOCAL_WORLD_SIZE": str(per_host)}
    shared |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    command = [*APART, sys.executable, str(SUPPORT / "processes/host_ranks.py")]
    hosts = []
    try:
        for number, name in enumerate(list(ADDRESSES)[:num_hosts]):
            words = [*network.enter(name), *command, str(number * per_host), str(per_host), *PLANS]
            environment = {**shared, "GROUP_RANK": str(number)}
            hosts.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
        lines = [line.split(" ", 2) for host in hosts for line in host.communicate(timeout=250)[0].splitlines()]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
            host.stdout.close()
    return {plan: [(found, moved_by) for found, moved_by, of in lines if of == plan] for plan in PLANS}


@pytest.fixture(scope="module")
def endings():
    """Of one host and of two. The ranks start once for all plans: that takes longer than to train."""
    with built_network(ADDRESSES) as network:
        return [trained(network, count) for count in (1, 2)]


@pytest.mark.parametrize("plan", PLANS)
def test_two_hosts_of_two_end_in_the_bits_of_one(endings, plan):
    one, two = (ending[plan] for ending in endings)
    assert len(one) == len(two) == 4, "a rank failed"
    assert len({found for found, _ in one + two}) == 1
    if plan.startswith("dp=4"):
        assert {moved_by for _, moved_by in one} == {"SharedTransport"}
        assert {moved_by for _, moved_by in two} == {"TwoLevelTransport"}
