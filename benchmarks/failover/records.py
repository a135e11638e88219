"""What servers and workers recorded, read from outside: when updates were made, and whether each push is in exactly one."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """A push: a worker's instance and its count."""

    worker: str
    number: int


@dataclass
class Records:
    """Everything that was written down in a folder so far; ``read`` brings it up to date."""

    folder: Path
    kept: dict[Identity, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    """Pushes that were acknowledged: when, and their work units."""
    made: dict[int, float] = field(default_factory=dict)
    """By update: when the first server had applied it to all of its shards."""
    updates: dict[int, tuple[float, tuple[Identity, ...]]] = field(default_factory=dict)
    """By update: what it was made of, by the latest word."""
    num_rewritten: int = 0
    """Updates that were made of something else when they were made before."""
    views: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By instance: when it went by which epoch."""
    applied: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often a server applied an update."""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self) -> None:
        """Take in what is new."""
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            # The line that is being written is left for the next time.
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(*json.loads(line))

    def _take(self, kind: str, when: float, instance_id: str, number: int, parts: list | None = None) -> None:
        match kind:
            case "kept":
                self.kept[Identity(instance_id, number)] = (when, tuple(parts or ()))
            case "made":
                entries = tuple(Identity(*part) for part in parts or ())
                before = self.updates.get(number)
                self.num_rewritten += before is not None and before[1] != entries
                if before is None or when > before[0]:
                    self.updates[number] = (when, entries)
                self.made[number] = min(when, self.made.get(number, when))
                self.applied[instance_id, number] += 1
            case "view":
                self.views.setdefault(instance_id, []).append((when, number))

    def num_made(self, before: float) -> int:
        """Updates that were made by a time: updates count from 0."""
        return 1 + max((number for number, when in self.made.items() if when <= before), default=-1)

    def seen(self, instance_id: str, epoch: int) -> float | None:
        """When a member went by an epoch or a later one."""
        return next((when for when, number in self.views.get(instance_id, ()) if number >= epoch), None)

    def longest_pause(self, since: float, until: float) -> float:
        """The longest time without an update, of those that touch an interval."""
        times = sorted(self.made.values())
        around = [(one, two) for one, two in itertools.pairwise(times) if two > since and one < until]
        return max((two - one for one, two in around), default=until - since)

    def balance(self, workers: int) -> dict[str, int]:
        """Acknowledged pushes against those that updates were made of, at the end of a run.

        Args:
            workers: shares of a step.
        """
        counts = Counter(entry for _, entries in self.updates.values() for entry in entries)
        last = max(self.updates)
        # Stopped from outside, a run ends with a step of which some shares were done; its update is never made.
        is_open = {one for one, (_, units) in self.kept.items() if min(units) // workers == last + 1}
        units = Counter(unit for one, (_, units) in self.kept.items() if one in counts for unit in units)
        return {
            "updates": len(self.updates),
            "missing_updates": last + 1 - len(self.updates),
            "acknowledged": len(self.kept),
            "acknowledged_in_an_update": sum(one in counts for one in self.kept),
            "of_the_step_that_was_open_at_the_stop": sum(one not in counts for one in is_open),
            "lost": sum(one not in counts and one not in is_open for one in self.kept),
            "in_two_updates": sum(count > 1 for count in counts.values()) + sum(count > 1 for count in units.values()),
            "applied_twice_by_a_server": sum(count > 1 for count in self.applied.values()),
            "updates_rewritten": self.num_rewritten,
        }
