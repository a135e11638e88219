"""Two ranks of one contender, one on each host, alive and waiting for their turn."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from hosts import ADDRESSES, DEVICE, Hosts

HERE = Path(__file__).resolve().parent
DEADLINE_SECONDS = 240
"""The longest wait for an answer, start-up included."""
_PORTS = iter(range(29500, 30500))
"""Of the first host, where nobody else is."""


class Pair:
    """The ranks of one contender."""

    def __init__(self, name: str, hosts: Hosts, model: str) -> None:
        self.name, self.hosts = name, hosts
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(next(_PORTS))}
        shared |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": DEVICE}
        shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self.ranks = [
            subprocess.Popen(
                [*hosts.enter(rank), sys.executable, str(HERE / "rank.py"), name, model],
                env={**shared, "RANK": str(rank), "GROUP_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]

    def take(self, steps: int) -> dict[str, Any] | None:
        """What both ranks measured over this many steps, and what their hosts sent meanwhile; None when one has failed."""
        before = self.hosts.sent()
        try:
            for rank in self.ranks:
                rank.stdin.write(f"{steps}\n")
                rank.stdin.flush()
        except BrokenPipeError:
            return None
        answers = [_line(rank) for rank in self.ranks]
        if not all(answers):
            return None
        after = self.hosts.sent()
        ranks = [json.loads(answer) for answer in answers]
        both = zip(*(rank["seconds"] for rank in ranks), strict=True)
        return {
            # A step is over when the slower of the two has taken it.
            "seconds": [max(pair) for pair in both],
            "cpu_seconds": max(rank["cpu_seconds"] for rank in ranks),
            "losses": [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)],
            "counted": [rank["counted"] for rank in ranks],
            "sent": [late.since(early) for early, late in zip(before, after, strict=True)],
        }

    def end(self) -> None:
        """End both ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


def _line(rank: subprocess.Popen) -> str:
    ready, _, _ = select.select([rank.stdout], [], [], DEADLINE_SECONDS)
    return rank.stdout.readline() if ready else ""
