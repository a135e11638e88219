"""What the update log writes down: a push that a worker commits, and an update of the weights, made of pushes.

Plain values that go to JSON and back without losing a bit, because a checkpoint, a new backup and every follower of the log must
read the same ones.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.paramserver.epochs import EpochSpan
from shoal.paramserver.receipts import EpochClosed

_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
Read: TypeAlias = tuple[int, ...]
"""The version of each shard in the weights that somebody works with. Shards are pulled one by one, so they may differ."""


class PushId(NamedTuple):
    """Names a push: pushes are idempotent by it."""

    worker: str
    """The worker's instance."""
    number: int
    """Counted by that worker from 0."""


class Entry(NamedTuple):
    """One push in an update."""

    worker: str
    number: int
    factor: float
    """What its gradient is multiplied by before it is added."""

    @property
    def identity(self) -> PushId:
        """Which push it is."""
        return PushId(self.worker, self.number)


class PushRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"units": "portions"}):
    """A gradient that every shard has acknowledged, as its worker commits it.

    Checkpoints call its units portions, as releases before this one did.
    """

    worker: str
    number: int
    """Counted by the worker from 0, used once."""
    units: tuple[int, ...]
    """The work units that it covers; more than one only where a worker adds up before it pushes."""
    samples: int
    weight: float
    """What its loss counts in the update's mean: samples, or tokens."""
    loss: float
    """Mean over its samples."""
    version: int
    """Version of the weights that it was computed with: of the shard that was furthest behind."""
    waited: float = 0.0
    """Seconds of its time that were no work: the random wait of ``half``. They are left out of the worker's mean step time."""
    steps: float = 1.0
    """Local steps that it is the direction of, or what they are worth (``local.effective_steps``); 1: it is a gradient."""
    rows: tuple[tuple[int, str], ...] = ()
    """Of each work unit: its samples, and the sum of their hashes, for the receipt of the epoch (``paramserver/receipts.py``)."""
    num_duplicates: int = 0
    """Of a step that is made from outside (``UpdateLog.advance``): work units of its batches that a second worker was given
    too."""

    @property
    def identity(self) -> PushId:
        """Names it to the shards."""
        return PushId(self.worker, self.number)

    @property
    def odd(self) -> str | None:
        """A number in it that would make nonsense of a factor or of a time; None when all are fine."""
        for name in ("samples", "weight", "steps", "waited"):
            number = getattr(self, name)
            if not math.isfinite(number) or number < 0:
                return f"its {name} is {number:g}, and must be finite and not below 0"
        if any(count < 0 or _DIGEST.fullmatch(digest) is None for count, digest in self.rows):
            return f"the rows of its work units are {str(self.rows)[:80]}, and are counts and sums of 32 hexadecimal digits"
        return None


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update: the pushes that make it, in the order in which they are added."""

    number: int
    """Counts from 0; after it the weights have version ``number + 1``."""
    entries: tuple[Entry, ...]
    loss: float
    """Mean of the pushes' losses, by their weights."""
    weight: float
    samples: int
    first_step: int
    """Lowest step that a work unit of it belongs to."""
    last_step: int
    staleness: int
    """Updates that closed between the oldest read of its pushes and itself."""
    dropped: tuple[PushId, ...] = ()
    """Pushes that no update will hold, found since the update before; shards forget their gradients here."""
    settled: int = 0
    """Work units that are in this update or an earlier one."""
    num_duplicates: int = 0
    """As in the push that it was made from outside by."""
    versions: tuple[int, ...] = ()
    """Of the weights that each entry was computed with."""
    units: tuple[tuple[int, ...], ...] = ()
    """That each entry covers."""
    epochs: tuple[EpochClosed, ...] = ()
    """That are complete with it."""


# What the update log answers to each input, as values: the server sends them on, and acts on what changed.


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an input changed for others. True in a condition when waiting takes must be decided again."""

    closed: tuple[Update, ...] = ()
    freed: tuple[int, ...] = ()
    """Work units that are todo again."""
    is_finished: bool = False
    """All work is done and in an update."""

    def __bool__(self) -> bool:
        return bool(self.closed or self.freed or self.is_finished)


NOTHING = Change()


@dataclass(frozen=True, kw_only=True)
class WorkUnit:
    """Work for the worker that asked."""

    number: int
    step: int
    share: int
    need: int
    """Version that the weights must at least have for it: the rule's bound, and the worker's own updates."""
    bound: int = 0
    """The rule's bound alone: parameters that a worker caches may be so old."""
    data: EpochSpan | None = None
    """The epoch that it is of, where the data grows."""


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
    """Do not park it: the worker holds work units that no one else will do, and must commit them before there is more."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run has no more work."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The push is kept."""

    update: int
    """The update that has it or will have it; weights that contain it have version ``update + 1`` or more."""
    is_again: bool = False
    """It had been committed before: an answer was lost on its way."""
    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """Another did one of its work units first; the push is not used."""

    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """It is older than the bound and not used; its work units are todo again."""

    age: int | None
    """Updates between its read and now; None when the same answer is given again."""
    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The input was wrong and changed no work."""

    reason: str
    change: Change = NOTHING


Taken = WorkUnit | Wait | Finished | Refused
Answer = Committed | Duplicate | Dropped | Refused
