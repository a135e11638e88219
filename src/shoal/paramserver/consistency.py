"""The update rules as pure functions: what may be read and taken, when an update closes, and what each push counts in it.

One code path with the settings of an ``UpdateRule``. The work is cut into work units, work unit ``p`` being share ``p % N`` of
step ``p // N``; *closed* is the number of updates there are, which is also the newest version of the weights.

What a gradient must be for these factors to be right (``is_share_of_step``): when a stepwise rule (bsp, ssp) averages, the
share's part of the mean over the whole step, so that the shares add up to it; else the mean over the push's own samples
(downpour: the sum of such means over the work units that it covers).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.core.updaterule import UpdateRule
from shoal.paramserver.records import PushRecord

Aggregate = Literal["average", "accumulate", "adasum", "fednova"]
"""How the pushes of an update become one gradient: their mean by samples, their sum, Adasum, or FedNova."""


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """What becomes of pushes that were computed with old weights, where the rule has no bound of its own."""

    staleness_aware: bool = False
    """Divide a gradient that is tau updates old by max(1, tau) (async and downpour)."""
    drop_beyond: int | None = None
    """Oldest gradient that still counts, in updates; an older one is dropped and its work units are done again. None: any age."""


def needs(rule: UpdateRule, step: int) -> int:
    """The version that weights must at least have to compute a work unit of this step: updates 0 .. step - s - 1 are in it.

    Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
    """
    return 0 if rule.staleness is None else max(0, step - rule.staleness)


def may_take(rule: UpdateRule, step: int, closed: int) -> bool:
    """Whether a work unit of this step may be computed when so many updates are closed."""
    return closed >= needs(rule, step)


def waits_for_update(rule: UpdateRule) -> bool:
    """Whether a worker whose push is in the open update waits for its end before it takes more.

    Without it a fast worker would fill the updates of ``half`` by itself, again and again with the same weights.
    """
    return rule.quorum is not None and rule.quorum > 1


def age(rule: UpdateRule, push: PushRecord, *, workers: int, closed: int) -> int:
    """Updates between what the push read and the update that it goes into (tau)."""
    return update_of(rule, push, workers=workers, closed=closed) - push.version


def update_of(rule: UpdateRule, push: PushRecord, *, workers: int, closed: int) -> int:
    """The update that a push goes into when it arrives now: its step's, or the one that is open."""
    return push.units[0] // workers if rule.is_stepwise else closed


def is_too_old(lateness: Lateness, tau: int) -> bool:
    """Whether a push of this age is dropped."""
    return lateness.drop_beyond is not None and tau > lateness.drop_beyond


def next_update(
    rule: UpdateRule, pending: Sequence[PushRecord], *, workers: int, closed: int, members: int, is_due: bool
) -> tuple[PushRecord, ...]:
    """The pushes of the update that can close now, in the order in which they are added; none: it stays open.

    Args:
        rule: resolved (``UpdateRule.resolve``).
        pending: committed and in no update yet, in the order of arrival.
        workers: shares of a step.
        closed: updates that are closed.
        members: workers that are alive. An update never waits for more than these: the others cannot come.
        is_due: the deadline has passed, or nothing more will come because all work is done.
    """
    if rule.is_stepwise:
        of_step = [one for one in pending if one.units[0] // workers == closed]
        # In share order: whoever computed them and whenever they came, the sum has the same bits.
        return tuple(sorted(of_step, key=lambda one: one.units[0])) if len(of_step) == workers else ()
    assert rule.quorum is not None, f"{rule} has no quorum; resolve it"
    quorum = min(rule.quorum, max(1, members))
    is_full = len(pending) >= quorum or (is_due and len(pending) > 0)
    return tuple(pending) if is_full else ()


def is_share_of_step(rule: UpdateRule, aggregate: Aggregate) -> bool:
    """True when a gradient is its share of the step's mean; False when it is the mean over the push's own samples."""
    return rule.is_stepwise and aggregate == "average"


def factors(
    rule: UpdateRule,
    lateness: Lateness,
    number: int,
    entries: Sequence[PushRecord],
    aggregate: Aggregate = "average",
    mean_steps: float = 1.0,
) -> tuple[float, ...]:
    """What each push of update ``number`` is multiplied by. Adasum joins what was multiplied, all others add it.

    ``fednova``: tau p_i, tau being the mean of the update's local steps. Where every push is an update of its own that would
    be its own number of steps, and a worker would count by it again; there it is ``mean_steps``, of all workers of the run.

    ``half``: a sample that is tau >= 1 updates late counts l = 1 / (1 + tau) times. An update that averages is the mean over its
    samples: n_i l_i / sum(n_j l_j). So pushes on time are among themselves the true mean, and a late one takes part by
    what it is worth without making the update longer. In an update of late ones alone that division would undo the discount;
    there it is by sum(n_j).
    """
    if is_share_of_step(rule, aggregate):
        return (1.0,) * len(entries)
    worth = _worth(rule, lateness, number, entries)
    if aggregate == "fednova" and rule.quorum == 1:
        return tuple(mean_steps * value for value in worth)
    if aggregate == "fednova":
        shares = [one.samples * value for one, value in zip(entries, worth, strict=True)]
        counted = [0.0] * len(entries) if not any(shares) else fednova_factors(shares, [one.steps for one in entries])
        # Where nobody is on time the division by the sum of shares would undo what being late costs.
        return tuple(factor * max(worth) for factor in counted)
    if aggregate != "average" or rule.kind != "half":
        return tuple(worth)
    weighted = [one.samples * value for one, value in zip(entries, worth, strict=True)]
    total = math.fsum(weighted) if 1.0 in worth else float(sum(one.samples for one in entries))
    return tuple(value / total if total else 0.0 for value in weighted)


def _worth(rule: UpdateRule, lateness: Lateness, number: int, entries: Sequence[PushRecord]) -> list[float]:
    """What is left of each push for being late: 1 when it is not, or when the rule itself bounds how late it can be."""
    if rule.is_stepwise:
        return [1.0] * len(entries)
    ages = [max(0, number - one.version) for one in entries]
    if rule.kind == "half":
        return [1.0 / (1 + tau) for tau in ages]
    # Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning": alpha / tau.
    return [1.0 / max(1, tau) if lateness.staleness_aware else 1.0 for tau in ages]


def fednova_factors(shares: Sequence[float], steps: Sequence[float]) -> list[float]:
    """What each direction of an update counts: ``tau p_i`` with ``tau = sum p_i |a_i|`` (Wang et al. 2020; see ``local.py``).

    Args:
        shares: of the objective, in any unit; made to add up to 1.
        steps: ``|a_i|`` of each direction.

    Raises:
        RequestError: there are none, they are not as many, or a share is below 0.
    """
    total = sum(shares)
    if len(shares) != len(steps) or min(shares, default=-1.0) < 0 or not total > 0:
        raise RequestError(
            f"{len(steps)} directions with shares {list(shares)}: each needs one of 0 or more, not all 0"
        )
    tau = sum(share / total * count for share, count in zip(shares, steps, strict=True))
    return [tau * share / total for share in shares]


def wait_seconds(rule: UpdateRule, seed: int, worker_index: int, number: int, mean_step_seconds: float) -> float:
    """The random wait before a worker's push of this number: even between 0 and ``rule.wait`` of its mean step time.

    Drawn from the names of what it is for, so that a run repeats it and no two workers keep the same rhythm.
    """
    drawn = derive_key("half wait", seed, worker_index, number) / 2**64
    return drawn * rule.wait * mean_step_seconds


def update_deadline(rule: UpdateRule, first_arrival: float, step_seconds: Iterable[float]) -> float | None:
    """When an open update closes with those that are there; None: not by time.

    The longest wait that the slowest worker can draw, counted from the first arrival. Without a wait an update closes by its
    quorum alone: a deadline of nothing would close it at the first arrival, which is ``async``.

    Args:
        rule: the update rule.
        first_arrival: when the first push of the open update came.
        step_seconds: mean step time of each worker that is alive and has one.
    """
    slowest = max(step_seconds, default=None)
    if slowest is None or rule.wait == 0 or not waits_for_update(rule):
        return None
    return first_arrival + rule.wait * slowest
