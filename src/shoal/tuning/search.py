"""Picks plans for this machine to be tried: legal plans are rehearsed, family by family, and ranked by predicted step. No torch.

A family is a way of sharing out the processes (dp, tp, cp, pp). One plain plan of each is timed first; then the variants of the
best families, ZeRO stages, sequence parallelism, kinds of attention and schedules. What is never picked: asynchronous schedules
and parameter servers, because they change what is computed; recompute, because it only costs time.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.units import format_bytes
from shoal.planner.hardware.machine import Machine
from shoal.telemetry.memory import free_bytes
from shoal.tuning.rehearsal_pool import MEMORY_SHARE, NoRoom, Page, held_bytes

_BEST_FAMILIES = 2
_NEAR = 1.25
"""A further family is looked at where its plain plan is predicted within this of the best."""

Family = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """Plans by predicted time, and what the numbers are made of."""

    ranked: tuple[Page, ...]
    """All plans that were rehearsed, the best first. One that was tried for real has ``tried_seconds``, ``tried_ratio`` (to the
    best of the same rounds) and ``num_turns`` as well."""
    num_legal: int
    """Synchronous plans that the model, the batch and the number of processes allow, without recompute."""
    seconds: float
    """How long it took to search."""
    machine: str
    """Where the machine's constants are from."""
    warnings: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Plans that turned out not to fit the model or the memory, and why."""
    tried: str = ""
    """How the best were tried, in words; empty where they were not."""

    @property
    def plan(self) -> str:
        """The best."""
        return str(self.ranked[0]["plan"])

    def describe(self) -> list[str]:
        """What was picked and why, for people."""
        best = self.ranked[0]
        lines = [
            f"plan auto: {best['plan']}, predicted {best['seconds'] * 1e3:.1f} ms a step; "
            f"{len(self.ranked)} of {self.num_legal} legal plans were rehearsed in {self.seconds:.0f} s"
        ]
        if len(self.ranked) > 1:
            second = self.ranked[1]
            lines.append(f"  runner-up: {second['plan']}, {_how_much_slower(best, second)}")
        if self.tried:
            lines.append(f"  {self.tried}:")
            lines += [f"    {_of_turns(page)}" for page in self.ranked if "tried_seconds" in page]
        lines.append(f"  constants: {self.machine}")
        lines.append(
            "  asynchronous schedules, parameter servers, sync and compress are never picked: they change what is computed"
        )
        return lines + [f"  {warning}" for warning in self.warnings]

    def page(self) -> Page:
        """What is kept beside the run: ``forecast.json``."""
        return {
            **self.ranked[0],
            "machine": self.machine,
            "runner_up": _without_ranks(self.ranked[1]) if len(self.ranked) > 1 else None,
        }


def _without_ranks(page: Page) -> Page:
    return {key: value for key, value in page.items() if key != "ranks"}


def _of_turns(page: Page) -> str:
    turns = f"{page['num_turns']} turn{'' if page['num_turns'] == 1 else 's'}"
    ratio = "the fastest" if page["tried_ratio"] == 1.0 else f"{page['tried_ratio'] - 1:+.1%} in the same rounds"
    return f"{page['plan']}: {page['tried_seconds'] * 1e3:.1f} ms in {turns}, {ratio}"


def _how_much_slower(best: Page, other: Page) -> str:
    """By real steps where both were tried, which say no reason; else by the prediction, which does."""
    if "tried_seconds" in best and "tried_seconds" in other:
        return f"{other['tried_ratio'] - 1:.1%} slower in real steps"
    return f"{other['seconds'] / best['seconds'] - 1:.1%} slower: {_why(best, other)}"


def _why(best: Page, other: Page) -> str:
    """The largest part of the difference, in words."""
    moved = {name: sum(page["communication_seconds"].values()) for name, page in (("best", best), ("other", other))}
    parts = {
        "computes": other["compute_seconds"] - best["compute_seconds"],
        "communicates": moved["other"] - moved["best"],
    }
    if other["bubble"]:
        parts["waits in its pipeline"] = other["bubble"] * other["seconds"]
    what, seconds = max(parts.items(), key=lambda part: part[1])
    return f"it {what} {seconds * 1e3:.1f} ms longer" if seconds > 0 else "no part of it stands out"


def search_plans(
    plans: Sequence[Plan], predict: Callable[[Plan], Page], machine: Machine, *, origin: str, budget_seconds: float
) -> PlanChoice:
    """Rehearse the plans that may be best.

    Args:
        plans: the legal ones.
        predict: rehearses one; may raise ``RequestError`` where it does not fit and ``RunError`` where it fails.
        machine: its constants.
        origin: where these are from.
        budget_seconds: after which no further plan is looked at.

    Raises:
        RequestError: none of them can be run.
    """
    started = time.monotonic()
    found: dict[Plan, Page] = {}
    refused: dict[str, str] = {}
    warnings: list[str] = []
    num_tight = 0
    for plan in _in_order(plans, found):
        if time.monotonic() - started > budget_seconds and found:
            left = len(plans) - len(found) - len(refused)
            warnings.append(f"looked for {budget_seconds:g} s: {left} of {len(plans)} plans were not rehearsed")
            break
        try:
            found[plan] = predict(plan)
        except (RequestError, RunError) as problem:
            num_tight += isinstance(problem, NoRoom)
            refused[str(plan)] = str(problem).splitlines()[0]
    if not found:
        raise RequestError(f"none of the {len(refused)} plans that were rehearsed can be run: {_first_of(refused)}")
    if num_tight:
        warnings.append(f"{num_tight} plans do not fit this machine's memory: {_first_of(refused)}")
    if len(refused) > num_tight:
        warnings.append(f"{len(refused) - num_tight} plans could not be rehearsed")
    ranked, tight = _within_memory(sorted(found.values(), key=lambda page: float(page["seconds"])), machine)
    return PlanChoice(
        ranked=tuple(ranked),
        num_legal=len(plans),
        seconds=time.monotonic() - started,
        machine=origin,
        warnings=(*warnings, *tight),
        refused=refused,
    )


def family_of(plan: Plan) -> Family:
    """How a plan shares out the processes."""
    return plan.dp or 1, plan.tp, plan.cp, plan.pp


def _in_order(plans: Sequence[Plan], found: dict[Plan, Page]) -> Iterator[Plan]:
    """One plan of each family, then the other plans of the best families by turns; ``found`` fills up in between.

    By turns, because time may be over before all: a pipeline has a dozen schedules, and ZeRO's stages would never be looked at.
    """
    families: dict[Family, list[Plan]] = {}
    for plan in plans:
        families.setdefault(family_of(plan), []).append(plan)
    plain = [_plainest(members) for members in families.values()]
    yield from plain
    times = sorted((float(page["seconds"]), family_of(plan)) for plan, page in found.items())
    near = [family for seconds, family in times if seconds <= times[0][0] * _NEAR]
    # A family whose plain plan did not fit may have one that does: ZeRO is there for it.
    without = [family for family in families if all(family != known for _, known in times)]
    best = near if len(near) > _BEST_FAMILIES else [family for _, family in times[:_BEST_FAMILIES]]
    others = [[plan for plan in families[family] if plan not in plain] for family in (*best, *without)]
    for turn in zip_longest(*others):
        yield from (plan for plan in turn if plan is not None)


def choose_finalists(ranked: Sequence[Page], *, most: int, fewest: int, unsure: float) -> list[Page]:
    """The pages to be tried for real, the best first: those within ``unsure`` of the best.

    Where they are too many, no more than half are of one family, as long as there are others: plans of one family are predicted
    with the same error, and were all finalists of one, the others would have no chance.
    """
    num_near = sum(page["seconds"] <= ranked[0]["seconds"] * unsure for page in ranked)
    near = list(range(min(len(ranked), max(fewest, num_near))))
    counts: Counter[Family] = Counter()
    first: list[int] = []
    for number in near:
        family = family_of(Plan.parse(str(ranked[number]["plan"])))
        counts[family] += 1
        if counts[family] <= max(1, most // 2):
            first.append(number)
    rest = [number for number in near if number not in first]
    return [ranked[number] for number in sorted([*first, *rest][:most])]


def _plainest(members: Sequence[Plan]) -> Plan:
    """The plan of a family with nothing added; of a pipeline the default schedule."""
    return min(
        members, key=lambda plan: (plan.zero, plan.sp, plan.cp_kind != "ring", plan.schedule not in (None, "1f1b"))
    )


def _within_memory(ranked: list[Page], machine: Machine) -> tuple[list[Page], list[str]]:
    """Plans that fit this machine's memory first, and what to say of the others."""
    limit = free_bytes() * MEMORY_SHARE

    def further(page: Page) -> float:
        # The processes that rehearse are as large as ranks without a model, and are not free to take now.
        return held_bytes(page, machine) - machine.rank_bytes * len(page["ranks"])

    rest = [page for page in ranked if further(page) > limit]
    if not rest:
        return ranked, []
    smallest = min(map(further, rest))
    warning = f"{len(rest)} plans need {format_bytes(smallest)} or more, and {format_bytes(limit)} are free"
    return [page for page in ranked if page not in rest] + rest, [warning]


def _first_of(refused: dict[str, str]) -> str:
    return next(iter(refused.values()))
