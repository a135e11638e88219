"""What the servers of a run write into their events that people should see: read from there, told once, and counted. No torch.

The processes of a job have no screen. What they decide for all (a gradient that nobody takes, everyone back to a checkpoint) is
an event first; the process that has the screen looks into the files, and so does the summary.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.retention import fall_back, newest_good
from shoal.comm.wire.errors import DROPPED, EXPECTED
from shoal.comm.wire.node import Node
from shoal.core.events import GradientRefused, MessagesDropped, StepDone, WentBack, WorkerHung
from shoal.core.rundir import RunDir
from shoal.telemetry.eventlog import append_event, decode_events

_COUNTED = {"not_finite": GradientRefused.kind, "went_back": WentBack.kind, "hung": WorkerHung.kind}


def read_events(run_dir: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The events of these kinds that the processes of a run have written, file by file."""
    for path in _event_files(run_dir):
        yield from _parse(path.read_bytes(), kinds)


def describe_refusal(event: Mapping[str, Any]) -> str:
    """A ``GradientRefused`` in one line."""
    return f"a gradient of {event['worker']} is refused, and no weight was touched: {event['reason']}"


def describe_rollback(event: Mapping[str, Any]) -> str:
    """A ``WentBack`` in one line."""
    died = list(event["died"])
    names = " and ".join([", ".join(died[:-1]), died[-1]] if len(died) > 1 else died) or "servers"
    where = (
        f"the checkpoint of step {event['step']}" if event["step"] else "the beginning, for there is no checkpoint yet"
    )
    return f"{names} died, and no copy of a shard was left: everyone went back to {where}"


def describe_hang(event: Mapping[str, Any]) -> str:
    """A ``WorkerHung`` in one line."""
    seconds, usual = event["seconds"], event["usual_seconds"]
    took = f"{seconds:.0f} s in one work unit, and {usual:.2g} s is usual"
    return f"{event['worker']} hangs in step {event['step']}: {took}; it ends itself, its log says where it was"


class Notices:
    """Follows the events of a run.

    Args:
        run_dir: whose. What is there already was told before.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read = {path: path.stat().st_size for path in _event_files(run_dir)}
        self._told: set[Any] = set()

    def look(self) -> list[str]:
        """What is new, a line each; what several servers say is told once."""
        lines = []
        for event in self._news():
            key = _key(event)
            if key not in self._told:
                self._told.add(key)
                lines.append(_DESCRIBE[event["kind"]](event))
        return lines

    def _news(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in _event_files(self._run_dir):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            # The last line may be half of one.
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += _parse(whole, _COUNTED.values())
        return sorted(found, key=lambda event: float(event["t"]))


def count_notices(run_dir: Path) -> dict[str, int]:
    """For the summary: refused gradients, returns to a checkpoint, and workers that hung, since the run began."""
    keys = {_key(event) for event in read_events(run_dir, *_COUNTED.values())}
    return {name: sum(key[0] == kind for key in keys) for name, kind in _COUNTED.items()}


def _event_files(run_dir: Path) -> list[Path]:
    return sorted(RunDir(run_dir).events(0).parent.glob("rank-*.jsonl"))


def _parse(text: bytes, kinds: Collection[str]) -> list[dict[str, Any]]:
    # Most lines are of other kinds, and are not worth decoding.
    marks = [f'"{kind}"'.encode() for kind in kinds]
    marked = (line for line in text.splitlines() if any(mark in line for mark in marks))
    return [event for event in decode_events(marked) if event.get("kind") in kinds]


def _key(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """What several processes may say in their own words."""
    match event["kind"]:
        case GradientRefused.kind:
            return event["kind"], event.get("push", event.get("contribution"))
        case WentBack.kind:
            return event["kind"], event["history"], event["step"]
    return event["kind"], event["worker"], event["t"]


_DESCRIBE: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    GradientRefused.kind: describe_refusal,
    WorkerHung.kind: describe_hang,
    WentBack.kind: describe_rollback,
}


# Messages to a process that it dropped: written into its events when there are new ones, and counted for the summary. No torch.
#
# The wire drops what is malformed, of an old epoch or seen before, and does no more about it (``comm/wire/errors.py``): a run
# must not end by what strangers send. But people should see that somebody does. What happens without any fault is left out.

_LOOK_SECONDS = 5.0


class DroppedMessages:
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
        event = MessagesDropped(process=self._name, instance_id=self._node.instance_id, counts=counts)
        append_event(RunDir(self._run_dir).events(self._rank), event, rank=self._rank)


def count_dropped(run_dir: Path) -> dict[str, int]:
    """For the summary: messages that were dropped, by reason, over all processes of a run that could write it down."""
    # Each tells all since its start, so its last word counts.
    newest: dict[str, Mapping[str, int]] = {
        event.get("instance_id", event.get("incarnation", "")): event["counts"]
        for event in read_events(run_dir, MessagesDropped.kind)
    }
    total: Counter[str] = Counter()
    for counts in newest.values():
        total.update(counts)
    return dict(sorted(total.items()))


# A run with parameter servers that ended in gradients which are not finite goes back to its last good checkpoint.
#
# The servers have marked the checkpoints from which finite gradients came, and are gone; whether it was such an end, the events
# say. No torch.


def fall_back_if_refused(run_dir: Path, *, since: float) -> str:
    """Set aside what is newer than the newest good checkpoint, where the last gradients were refused; what to say, or nothing.

    A gradient that was refused before a step was taken did not end the run.

    Args:
        run_dir: of a run that has failed.
        since: when it was started, as ``time.time()`` tells it: what happened before was another attempt.

    Raises:
        OSError: the disk refused.
    """
    root = RunDir(run_dir).checkpoints
    refused = taken = since
    for event in read_events(run_dir, GradientRefused.kind, StepDone.kind):
        if event["kind"] == GradientRefused.kind:
            refused = max(refused, event["t"])
        elif math.isfinite(float(event["loss"] or 0.0)):
            taken = max(taken, event["t"])
    if refused <= taken:
        return ""
    return f"{fall_back(root, newest_good(root)).describe(root)}. Resume with a lower optim.lr"
