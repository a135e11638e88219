"""A callback that counts what a rank sends in training steps, and leaves the sum in the run directory. Evaluations are not
counted.

The product counts whole tensors for sums and gathers (``comm/trafficcounter.py``); here they become bytes that a rank sends, by
the least that each operation can do with: a ring's.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path

from shoal import Hook
from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.syncrule import SyncRule


class SentBytes(Hook):
    """Opens the mesh's own counter during every step."""

    def __init__(self) -> None:
        self.total: TrafficCounts = {}
        self._counting = ExitStack()
        self._moved: TrafficCounts = {}

    def on_attach(self, model) -> None:
        """Remember the mesh and the plan."""
        self._mesh, self._plan = model.mesh, model.plan

    def on_step_start(self, step, batch) -> None:
        """Begin to count."""
        self._moved = self._counting.enter_context(self._mesh.traffic.counting())

    def on_update(self, step, result) -> None:
        """Add the step's count."""
        self._counting.close()
        self.total = add_traffic(self.total, self._moved)

    def on_end(self, step, status) -> None:
        """Write what this rank has sent: bytes by axis and operation, and in all."""
        size = int(os.environ["WORLD_SIZE"])
        # Gossip counts what goes to neighbours; elsewhere a rank's part for itself is in the count and goes nowhere.
        is_gossip = SyncRule.parse(self._plan.sync).graph is not None
        found = {
            f"{axis} {operation}": [
                traffic.calls,
                traffic.num_bytes,
                sent(operation, traffic, size, is_gossip=is_gossip),
            ]
            for (axis, operation), traffic in sorted(self.total.items())
        }
        folder = Path(os.environ["SENT_BYTES"])
        folder.mkdir(parents=True, exist_ok=True)
        rank = os.environ["RANK"]
        (folder / f"rank-{rank}.json").write_text(json.dumps({"steps": step, "traffic": found}))


def sent(operation: str, traffic: Traffic, size: int, *, is_gossip: bool) -> int:
    """Bytes that a rank sends for what was counted, among ``size`` ranks."""
    others = (size - 1) / size
    if operation in ("all_reduce", "all_reduce_max"):
        return round(2 * others * traffic.num_bytes)
    return traffic.num_bytes if is_gossip else round(others * traffic.num_bytes)
