"""What the update rules of parameter servers promise, and whether the log of a run keeps it. Pure, and written a second time.

Which weights a gradient was computed from is decided by timing under every rule but ``bsp``, so no reference can foretell a run.
But the run says what it did: which work units went into which update, from which version of each shard, times which factor. Here
that record is held against the rule; ``replay.py`` then computes what it says in one process. Nothing of ``paramserver/`` is
imported.

    work unit p        share p % N of step p // N, N shares in a step; each is in exactly one update
    bsp, ssp:S       update r is the N shares of step r in their order, times 1; each was computed from versions r - S to r
    async            every gradient is an update, times 1, or times 1 / max(1, tau) where the recipe asks for it
    half:K,W         up to K gradients of different workers; n_i l_i / sum(n_j l_j) with n_i samples and l = 1 / (1 + tau);
                     where all of them are late, n_i l_i / sum(n_j)
    downpour:P,F     an update is the sum of up to P gradients of one worker, who took a step of its own after each; before every
                     F-th of them it read the servers' weights, before the others it has only its own

tau is the update's number less the oldest version that the gradient was computed from. Where a gradient is in an update as soon
as it arrives, or its worker waits for that, the worker's next read has it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Work:
    """One gradient that a worker computed."""

    unit: int
    read: tuple[int, ...] | None
    """Version of each shard that the worker read for it; None: it went on with its own weights."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a worker pushed, as it is in an update: one gradient, or the sum of several."""

    worker: str
    index: int
    """The worker's number in the plan."""
    works: tuple[Work, ...]
    """In the order in which they were added."""
    versions: tuple[int, ...]
    """Of the weights that the first of them was computed from, or goes back to, by shard."""
    claimed: int
    """The version that the servers were told."""
    factor: float
    """What it was multiplied by."""
    samples: int
    """That its worker counted."""
    number: int = 0
    """Of the push, counted by its worker: pushes of a step are added in the order of shares, not in that of their making."""

    @property
    def version(self) -> int:
        """The oldest that it read."""
        return min(self.versions)


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of the log: what was added up, in this order."""

    parts: tuple[Part, ...]
    loss: float

    def as_values(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A rule in plain numbers."""

    name: str
    """As the plan writes it."""
    shares: int
    steps: int
    staleness: int | None
    """How many versions old a read may be; None: any."""
    quorum: int | None
    """Gradients in an update; None: every share of a step."""
    may_be_short: bool = False
    """An update may have fewer because time was up."""
    weighs: bool = False
    """Gradients count by their samples and their age."""
    divides_by_age: bool = False
    drop_beyond: int | None = None
    """The oldest gradient that counts."""
    overlaps: bool = False
    """A worker reads while its gradient is still on its way."""
    push_every: int = 1
    """Gradients that a worker adds up."""
    fetch_every: int = 1
    """Gradients for which a worker reads once."""

    @property
    def is_plain(self) -> bool:
        """True when every read is of the newest weights, so that one process needs no record to compute the same."""
        is_alone = self.shares == 1 and not self.overlaps and self.push_every == self.fetch_every == 1
        return is_alone or (self.quorum is None and self.staleness == 0)

    @property
    def sees_own(self) -> bool:
        """True when a worker's gradient is in an update before the worker reads again."""
        return not self.overlaps and (self.quorum is not None or self.staleness == 0 or self.shares == 1)

    def total_updates(self, total_steps: int) -> int:
        """How many updates the learning rate counts in a run of so many steps."""
        if self.quorum is None:
            return total_steps
        return max(1, math.ceil(total_steps * self.shares / (self.quorum * self.push_every)))


def find_violation(promise: Promise, updates: Sequence[Update], samples: Mapping[int, int]) -> str | None:
    """What in a run's record is against its rule, in one sentence; None when nothing is.

    Args:
        promise: the rule.
        updates: the record, in order.
        samples: that each work unit has, by its number.
    """
    past = _Past()
    for number, update in enumerate(updates):
        problem = None
        for part in update.parts:
            problem = problem or _part_problem(promise, number, part, past)
            past.add(part)
        problem = problem or _shape_problem(promise, number, updates)
        problem = problem or _factor_problem(promise, number, update, samples)
        if problem is not None:
            return f"update {number + 1} of {promise.name}: {problem}"
        past.own |= dict.fromkeys((part.worker for part in update.parts), number + 1)
    seen = past.seen
    missing = sorted(set(range(promise.steps * promise.shares)) - seen.keys())
    if missing:
        return f"{_unit(promise, missing[0])} is in no update, and {len(missing) - 1} others are not"
    return None


def expected_factors(promise: Promise, number: int, parts: Sequence[Part], samples: Mapping[int, int]) -> list[float]:
    """What the rule multiplies each gradient of an update by."""
    ages = [number - part.version for part in parts]
    if not promise.weighs:
        return [1.0 / max(1, age) if promise.divides_by_age else 1.0 for age in ages]
    counts = [_count(part, samples) for part in parts]
    worth = [count / (1 + age) for count, age in zip(counts, ages, strict=True)]
    whole = math.fsum(worth) if 0 in ages else float(sum(counts))
    return [value / whole if whole else 0.0 for value in worth]


@dataclass
class _Past:
    """What the record said so far."""

    seen: dict[int, int] = field(default_factory=dict)
    """The update of each work unit."""
    own: dict[str, int] = field(default_factory=dict)
    """By worker: the first version that has all its gradients."""
    num_works: dict[str, int] = field(default_factory=dict)
    """By worker."""

    def add(self, part: Part) -> None:
        self.num_works[part.worker] = self.num_works.get(part.worker, 0) + len(part.works)


def _part_problem(promise: Promise, number: int, part: Part, past: _Past) -> str | None:
    """Of one push: which work units it has, and what they were computed from."""
    if not 1 <= len(part.works) <= promise.push_every:
        return f"a worker pushed {len(part.works)} gradients together, and {promise.push_every} are allowed"
    what = _unit(promise, part.works[0].unit)
    if part.claimed != part.version:
        return f"{what} was computed from version {part.version}, and the servers were told {part.claimed}"
    if promise.staleness is not None and part.version < number - promise.staleness:
        return (
            f"{what} was computed from version {part.version}, and the bound of {promise.staleness} allows none "
            f"below {number - promise.staleness}"
        )
    if promise.drop_beyond is not None and number - part.version > promise.drop_beyond:
        return f"{what} is {number - part.version} updates old, and older than {promise.drop_beyond} is to be dropped"
    for place, work in enumerate(part.works):
        problem = _work_problem(promise, number, part, work, past.num_works.get(part.worker, 0) + place, past)
        if problem is not None:
            return problem
        past.seen[work.unit] = number
    return None


def _work_problem(promise: Promise, number: int, part: Part, work: Work, num_before: int, past: _Past) -> str | None:
    """Of one gradient, before which its worker computed so many."""
    if not 0 <= work.unit < promise.steps * promise.shares:
        return f"there is no work unit {work.unit} in {promise.steps} steps of {promise.shares} shares"
    what = _unit(promise, work.unit)
    if work.unit in past.seen:
        return f"{what} was in update {past.seen[work.unit] + 1} already"
    if (work.read is not None) != (num_before % promise.fetch_every == 0):
        does = "did not read" if work.read is None else "read"
        return f"a worker {does} before its gradient {num_before + 1}, {what}, and is to every {promise.fetch_every}"
    if work.read is None:
        return None
    if max(work.read) > number:
        return f"{what} was computed from version {max(work.read)}, which there was not yet"
    if promise.sees_own and min(work.read) < past.own.get(part.worker, 0):
        return (
            f"{what} was computed from version {min(work.read)} by a worker whose own gradient is in version "
            f"{past.own[part.worker]}"
        )
    return None


def _shape_problem(promise: Promise, number: int, updates: Sequence[Update]) -> str | None:
    """Of the update as a whole: how many gradients, and in which order."""
    parts = updates[number].parts
    if promise.quorum is None:
        wanted = [number * promise.shares + share for share in range(promise.shares)]
        found = [work.unit for part in parts for work in part.works]
        if found != wanted:
            return f"it has work units {found}, and the shares of its step in order are {wanted}"
        return None
    is_last = number == len(updates) - 1
    if not parts or len(parts) > promise.quorum:
        return f"it has {len(parts)} gradients, and closes at {promise.quorum}"
    if len(parts) < promise.quorum and not (promise.may_be_short or is_last):
        return f"it has {len(parts)} gradients and not {promise.quorum}, and more were to come"
    workers = [part.worker for part in parts]
    if promise.sees_own and len(set(workers)) < len(workers):
        return "a worker has two gradients in it, and waits for its end after the first"
    return None


def _factor_problem(promise: Promise, number: int, update: Update, samples: Mapping[int, int]) -> str | None:
    wanted = expected_factors(promise, number, update.parts, samples)
    for part, factor in zip(update.parts, wanted, strict=True):
        what = _unit(promise, part.works[0].unit)
        if part.samples != _count(part, samples):
            return f"{what} counts {part.samples} samples and has {_count(part, samples)}"
        # To rounding: n / 3 and n * (1 / 3) are the same rule, and the replay multiplies by what the run did.
        if not math.isclose(part.factor, factor, rel_tol=_ROUNDING):
            age = number - part.version
            return (
                f"{what}, {age} updates late, was multiplied by {part.factor:.6g}, and by the rule it is {factor:.6g}"
            )
    return None


def _count(part: Part, samples: Mapping[int, int]) -> int:
    return sum(samples[work.unit] for work in part.works)


def _unit(promise: Promise, unit: int) -> str:
    step, share = divmod(unit, promise.shares)
    return f"share {share + 1} of step {step + 1}"
