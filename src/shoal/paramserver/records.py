"""What the book writes down: a contribution that a worker commits, and a round, which is one update of the weights.

Plain values that go to JSON and back without losing a bit, because a checkpoint, a new backup and every follower of the log must
read the same ones.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

Read: TypeAlias = tuple[int, ...]
"""The version of each shard in the weights that somebody works with. Shards are pulled one by one, so they may differ."""


class Identity(NamedTuple):
    """Names a contribution: pushes are idempotent by it."""

    worker: str
    """The worker's instance."""
    number: int
    """Counted by that worker from 0."""


class Entry(NamedTuple):
    """One contribution in a round."""

    worker: str
    number: int
    factor: float
    """What its gradient is multiplied by before it is added."""

    @property
    def identity(self) -> Identity:
        """Which contribution it is."""
        return Identity(self.worker, self.number)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A gradient that every shard has acknowledged, as its worker commits it."""

    worker: str
    number: int
    """Counted by the worker from 0, used once."""
    portions: tuple[int, ...]
    """The portions that it covers; more than one only where a worker adds up before it pushes."""
    samples: int
    weight: float
    """What its loss counts in the round's mean: samples, or tokens."""
    loss: float
    """Mean over its samples."""
    version: int
    """Version of the weights that it was computed with: of the shard that was furthest behind."""
    waited: float = 0.0
    """Seconds of its time that were no work: the random wait of ``half``. They are left out of the worker's mean step time."""
    steps: float = 1.0
    """Local steps that it is the direction of, or what they are worth (``local.effective_steps``); 1: it is a gradient."""
    num_duplicates: int = 0
    """Of a step that is made from outside (``Book.advance``): portions of its batches that a second worker was given too."""

    @property
    def identity(self) -> Identity:
        """Names it to the shards."""
        return Identity(self.worker, self.number)

    @property
    def odd(self) -> str | None:
        """A number in it that would make nonsense of a factor or of a time; None when all are fine."""
        for name in ("samples", "weight", "steps", "waited"):
            number = getattr(self, name)
            if not math.isfinite(number) or number < 0:
                return f"its {name} is {number:g}, and must be finite and not below 0"
        return None


@dataclass(frozen=True, kw_only=True)
class Round:
    """One update: the contributions that make it, in the order in which they are added."""

    number: int
    """Counts from 0; after it the weights have version ``number + 1``."""
    entries: tuple[Entry, ...]
    loss: float
    """Mean of the contributions' losses, by their weights."""
    weight: float
    samples: int
    first_step: int
    """Lowest step that a portion of it belongs to."""
    last_step: int
    staleness: int
    """Rounds that closed between the oldest read of its contributions and itself."""
    dropped: tuple[Identity, ...] = ()
    """Contributions that no round will hold, found since the round before; shards forget their gradients here."""
    settled: int = 0
    """Portions that are in this round or an earlier one."""
    num_duplicates: int = 0
    """As in the contribution that it was made from outside by."""
    versions: tuple[int, ...] = ()
    """Of the weights that each entry was computed with."""
    portions: tuple[tuple[int, ...], ...] = ()
    """That each entry covers."""


def round_to_json(record: Round) -> dict[str, Any]:
    """For ``json``."""
    return asdict(record) | {
        "entries": [list(entry) for entry in record.entries],
        "dropped": [list(i) for i in record.dropped],
    }


def round_from_json(data: Mapping[str, Any]) -> Round:
    """The inverse of ``round_to_json``."""
    named = {
        "entries": tuple(Entry(*entry) for entry in data["entries"]),
        "dropped": tuple(Identity(*one) for one in data["dropped"]),
        "versions": tuple(data.get("versions", ())),
        "portions": tuple(tuple(covered) for covered in data.get("portions", ())),
    }
    return Round(**{**data, **named})


def contribution_from_json(data: Mapping[str, Any]) -> Contribution:
    """The inverse of ``dataclasses.asdict``."""
    return Contribution(**{**data, "portions": tuple(data["portions"])})


# TODO docstring of the former paramserver.answers:
# What the book answers to each input, as values: the server sends them on, and acts on what changed.


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an input changed for others. True in a condition when waiting takes must be decided again."""

    closed: tuple[Round, ...] = ()
    freed: tuple[int, ...] = ()
    """Portions that are todo again."""
    is_finished: bool = False
    """All work is done and in a round."""

    def __bool__(self) -> bool:
        return bool(self.closed or self.freed or self.is_finished)


NOTHING = Change()


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Work for the worker that asked."""

    number: int
    step: int
    share: int
    need: int
    """Version that the weights must at least have for it: the rule's bound, and the worker's own rounds."""
    bound: int = 0
    """The rule's bound alone: parameters that a worker caches may be so old."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing now; ask again when something changed."""

    reason: str
    """What must happen first."""
    on: tuple[str, ...] = ()
    """The workers that it waits for."""
    until: float | None = None
    """Ask again at this time even if nothing changed; None: no need."""
    must_commit: bool = False
    """Do not park it: the worker holds portions that no one else will do, and must commit them before there is more."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run has no more work."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The contribution is kept."""

    round: int
    """The round that has it or will have it; weights that contain it have version ``round + 1`` or more."""
    is_again: bool = False
    """It had been committed before: an answer was lost on its way."""
    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """Another did one of its portions first; the contribution is not used."""

    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """It is older than the bound and not used; its portions are todo again."""

    age: int | None
    """Rounds between its read and now; None when the same answer is given again."""
    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The input was wrong and changed no work."""

    reason: str
    change: Change = NOTHING


Taken = Portion | Wait | Finished | Refused
Answer = Committed | Duplicate | Dropped | Refused
