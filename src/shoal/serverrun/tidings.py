"""What the servers of a run write into their events that people should see: read from there, told once, and counted. No torch.

The processes of a crew have no screen. What they decide for all (a gradient that nobody takes, everyone back to a checkpoint) is
an event first; the process that has the screen looks into the files, and so does the summary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.events import GradientRefused, WentBack, WorkerHung
from shoal.core.rundir import RunDir
from shoal.telemetry.lines import decode_events

_COUNTED = {"not_finite": GradientRefused.kind, "went_back": WentBack.kind, "hung": WorkerHung.kind}
_MARKS = tuple(f'"{kind}"'.encode() for kind in _COUNTED.values())


def describe_refusal(event: Mapping[str, Any]) -> str:
    """A ``GradientRefused`` in one line."""
    return f"a gradient of {event['worker']} is refused, and no weight was touched: {event['reason']}"


def describe_return(event: Mapping[str, Any]) -> str:
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
    took = f"{seconds:.0f} s in one portion, and {usual:.2g} s is usual"
    return f"{event['worker']} hangs in step {event['step']}: {took}; it ends itself, its log says where it was"


class Tidings:
    """Follows the events of a run.

    Args:
        run_dir: whose. What is there already was told before.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = RunDir(run_dir).events(0).parent
        self._read = {path: path.stat().st_size for path in self._paths()}
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
        for path in self._paths():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            # The last line may be half of one.
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += _parse(whole)
        return sorted(found, key=lambda event: float(event["t"]))

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("rank-*.jsonl"))


def count_tidings(run_dir: Path) -> dict[str, int]:
    """For the summary: refused gradients, returns to a checkpoint, and workers that hung, since the run began."""
    events: list[dict[str, Any]] = []
    for path in sorted(RunDir(run_dir).events(0).parent.glob("rank-*.jsonl")):
        events += _parse(path.read_bytes())
    keys = {_key(event) for event in events}
    return {name: sum(key[0] == kind for key in keys) for name, kind in _COUNTED.items()}


def _parse(text: bytes) -> list[dict[str, Any]]:
    marked = (line for line in text.splitlines() if any(mark in line for mark in _MARKS))
    return [event for event in decode_events(marked) if event.get("kind") in _COUNTED.values()]


def _key(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """What several processes may say in their own words."""
    match event["kind"]:
        case GradientRefused.kind:
            return event["kind"], event["contribution"]
        case WentBack.kind:
            return event["kind"], event["history"], event["step"]
    return event["kind"], event["worker"], event["t"]


_DESCRIBE: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    GradientRefused.kind: describe_refusal,
    WorkerHung.kind: describe_hang,
    WentBack.kind: describe_return,
}
