"""Messages to a process that it dropped: written into its events when there are new ones, and counted for the summary. No torch.

The wire drops what is malformed, of an old epoch or seen before, and does no more about it (``comm/wire/counters.py``): a run
must not end by what strangers send. But people should see that somebody does. What happens without any fault is left out.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shoal.comm.wire.counters import DROPPED, EXPECTED
from shoal.comm.wire.node import Node
from shoal.core.events import MessagesDropped
from shoal.core.rundir import RunDir
from shoal.telemetry.lines import append_event, decode_events

_LOOK_SECONDS = 5.0
_MARK = f'"{MessagesDropped.kind}"'.encode()


class Tally:
    """Writes down what a node drops.

    Args:
        node: whose counts.
        name: of the process.
        run_dir: where its events are; None for one that leaves nothing behind, which says it at its end.
        rank: of its file.
    """

    def __init__(self, node: Node, *, name: str, run_dir: Path | None, rank: int) -> None:
        self._node = node
        self._name = name
        self._run_dir = run_dir
        self._rank = rank
        self._told: Mapping[str, int] = {}

    async def keep(self) -> None:
        """Look from time to time, and once more when the node is closed, which cancels this."""
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if self._run_dir is not None:
                    self.write()
        finally:
            self.write()

    def write(self) -> None:
        """Write the counts down, if there are new ones."""
        counters = self._node.counters
        counts = {reason: counters[reason] for reason in DROPPED if counters[reason] and reason not in EXPECTED}
        if counts == self._told:
            return
        self._told = counts
        if self._run_dir is None:
            listed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
            print(f"messages that were dropped: {listed}", file=sys.stderr, flush=True)
            return
        event = MessagesDropped(process=self._name, incarnation=self._node.incarnation, counts=counts)
        append_event(RunDir(self._run_dir).events(self._rank), event, rank=self._rank)


def count_dropped(run_dir: Path) -> dict[str, int]:
    """For the summary: messages that were dropped, by reason, over all processes of a run that could write it down."""
    newest: dict[str, Mapping[str, int]] = {}
    for path in sorted(RunDir(run_dir).events(0).parent.glob("rank-*.jsonl")):
        marked = (line for line in path.read_bytes().splitlines() if _MARK in line)
        # Each tells all since its start, so its last word counts.
        newest |= {
            event["incarnation"]: event["counts"]
            for event in decode_events(marked)
            if event.get("kind") == MessagesDropped.kind
        }
    total: Counter[str] = Counter()
    for counts in newest.values():
        total.update(counts)
    return dict(sorted(total.items()))
