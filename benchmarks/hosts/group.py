"""The ranks of one contender, alive on their hosts and waiting for their turn."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from namespaces import DEVICE, Hosts

HERE = Path(__file__).resolve().parent
DEADLINE_SECONDS = 300
"""The longest wait for an answer, start-up included."""
_PORTS = iter(range(29500, 30500))
"""Of the first host, where nobody else is."""


class Group:
    """``per_host`` ranks on each host; ranks follow one another host by host."""

    def __init__(self, hosts: Hosts, *words: str, num_hosts: int, per_host: int = 1) -> None:
        size = num_hosts * per_host
        shared = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": hosts.address(0)}
        shared |= {"MASTER_PORT": str(next(_PORTS)), "LOCAL_WORLD_SIZE": str(per_host)}
        shared |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": DEVICE}
        self.size = size
        self.hosts = [
            # One process of a host starts its ranks: they must see one another to share memory.
            subprocess.Popen(
                [*hosts.enter(host), sys.executable, str(HERE / "rank.py"), str(host), str(per_host), *words],
                env={**shared, "GROUP_RANK": str(host)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL,
                text=True,
            )
            for host in range(num_hosts)
        ]

    def take(self, count: int) -> dict[str, Any] | None:
        """What the first rank of each host measured over so many rounds, the slowest of each; None when one has failed."""
        try:
            for host in self.hosts:
                host.stdin.write(f"{count}\n")
                host.stdin.flush()
        except BrokenPipeError:
            return None
        answers = [_line(host) for host in self.hosts]
        if not all(answers):
            return None
        found = [json.loads(answer) for answer in answers]
        return {key: max(one[key] for one in found) for key in found[0]}

    def end(self) -> None:
        """End all ranks: the first process of a host's space of process ids takes the others with it."""
        for host in self.hosts:
            host.kill()
            host.wait()
            host.stdin.close()
            host.stdout.close()


def _line(host: subprocess.Popen) -> str:
    ready, _, _ = select.select([host.stdout], [], [], DEADLINE_SECONDS)
    return host.stdout.readline() if ready else ""
