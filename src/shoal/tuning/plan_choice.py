"""Asks for a plan and says what was found: the launcher's side of ``--plan auto`` and of ``shoal tune``. No torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.engine.resolve import check_processes
from shoal.planner.hardware.machine import Machine, num_cores
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe, load_recipe
from shoal.tuning.calibration import find_machine
from shoal.tuning.rehearsal_pool import RehearsalPool
from shoal.tuning.search import choose_finalists, search_plans
from shoal.tuning.successive_halving import halve_plans

AUTO = "auto"
_UNSURE = 1.25
"""Plans that are predicted within this of the best are tried for real: predictions of single plans are up to a fifth off."""
_FEWEST = 2
_STEPS = 3
"""Real steps of a turn."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Plans by predicted time, and what the numbers are made of."""

    ranked: tuple[dict[str, Any], ...]
    """``plan``, ``seconds``, ``compute_seconds``, ``communication_seconds``, ``bubble``, and ``ranks``: what each will move and
    hold; the best first. Where it was tried for real: ``tried_seconds``, ``tried_ratio`` (to the best of the same rounds) and
    ``num_turns``."""
    num_legal: int
    seconds: float
    machine: str
    """Where the machine's constants are from."""
    remarks: tuple[str, ...]
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
        lines.append("  asynchronous schedules and parameter servers are never picked: they change what is computed")
        return lines + [f"  {remark}" for remark in self.remarks]

    def page(self) -> dict[str, Any]:
        """What is kept beside the run: ``forecast.json``."""
        return {
            **self.ranked[0],
            "machine": self.machine,
            "runner_up": _without_ranks(self.ranked[1]) if len(self.ranked) > 1 else None,
        }


def _without_ranks(page: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in page.items() if key != "ranks"}


def _of_turns(page: dict[str, Any]) -> str:
    turns = f"{page['num_turns']} turn{'' if page['num_turns'] == 1 else 's'}"
    ratio = "the fastest" if page["tried_ratio"] == 1.0 else f"{page['tried_ratio'] - 1:+.1%} in the same rounds"
    return f"{page['plan']}: {page['tried_seconds'] * 1e3:.1f} ms in {turns}, {ratio}"


def _how_much_slower(best: dict[str, Any], other: dict[str, Any]) -> str:
    """By real steps where both were tried, which say no reason; else by the prediction, which does."""
    if "tried_seconds" in best and "tried_seconds" in other:
        return f"{other['tried_ratio'] - 1:.1%} slower in real steps"
    return f"{other['seconds'] / best['seconds'] - 1:.1%} slower: {_why(best, other)}"


def _why(best: dict[str, Any], other: dict[str, Any]) -> str:
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


def decide(
    recipe: Recipe,
    num_processes: int | None,
    *,
    machine: Path | None = None,
    plans: Sequence[str] = (),
) -> Decision:
    """Rank the legal plans of a recipe on this machine, or time the plans that are named.

    Args:
        recipe: as it would be trained.
        num_processes: of every plan; of the plans that are named, or as many as there are cores, when left out.
        machine: the machine file; the user's own when left out.
        plans: to be timed in place of a search.

    Raises:
        RequestError: no plan fits, or the machine file is wrong.
        RunError: a process that looks died.
    """
    count = num_processes or (Plan.parse(plans[0]).world_size if plans else num_cores())
    check_processes(count)
    found, origin = find_machine(
        machine, num_processes=count, tell=_tell, before=None if plans else partial(require_plans, recipe, count)
    )
    with RehearsalPool(recipe, count) as pool:
        return search(pool, found, origin) if not plans else _predict_all(pool, found, origin, plans)


def search(pool: RehearsalPool, machine: Machine, origin: str) -> Decision:
    """Rank the legal plans that may be best, by rehearsing them.

    Raises:
        RequestError: no plan fits.
    """
    legal = pool.legal_plans()
    if not legal:
        raise _no_plan(pool.recipe, pool.num_processes)
    budget = pool.recipe.planner.auto.search_seconds
    choice = search_plans(legal, lambda plan: pool.rehearse(plan, machine), machine, budget_seconds=budget)
    return Decision(
        ranked=choice.ranked,
        num_legal=choice.num_legal,
        seconds=choice.seconds,
        machine=origin,
        remarks=choice.remarks,
    )


def _no_plan(recipe: Recipe, num_processes: int) -> RequestError:
    return RequestError(
        f"no plan for {num_processes} processes fits the model and global_batch {recipe.train.global_batch}; change --nproc or "
        f"train.global_batch"
    )


def require_plans(recipe: Recipe, num_processes: int) -> None:
    """Ask one process whether there is a plan at all: it takes as long as building the model, and timing a machine half a minute.

    Raises:
        RequestError: no plan fits.
    """
    with RehearsalPool(recipe, 1) as pool:
        if not pool.legal_plans(num_processes):
            raise _no_plan(recipe, num_processes)


def _predict_all(pool: RehearsalPool, machine: Machine, origin: str, plans: Sequence[str]) -> Decision:
    pages = tuple(pool.rehearse(Plan.parse(plan), machine) for plan in plans)
    return Decision(ranked=pages, num_legal=len(pages), seconds=0.0, machine=origin, remarks=())


def pick(recipe: Recipe, num_processes: int | None, *, machine: Path | None = None) -> Decision:
    """The plan to run: the best predicted ones are tried for real, and the fastest of them comes first.

    Raises:
        RequestError: no plan fits, or the machine file is wrong.
        RunError: a process that looks died.
    """
    count = num_processes or num_cores()
    check_processes(count)
    found, origin = find_machine(machine, num_processes=count, tell=_tell, before=partial(require_plans, recipe, count))
    auto = recipe.planner.auto
    _tell(
        f"plan auto: looking at plans for {count} processes, for at most {auto.search_seconds:g} s, and then trying the best "
        f"for at most {auto.try_seconds:g} s (planner.auto.search_seconds, try_seconds)"
    )
    with RehearsalPool(recipe, count) as pool:
        return pick_from(pool, search(pool, found, origin))


def pick_from(pool: RehearsalPool, decision: Decision) -> Decision:
    """Try the finalists of a search, on the processes that rehearsed them; the fastest comes first."""
    auto = pool.recipe.planner.auto
    finalists = choose_finalists(decision.ranked, most=auto.finalists, fewest=_FEWEST, unsure=_UNSURE)
    if len(finalists) < 2 or auto.try_seconds == 0:
        return decision
    halving = halve_plans(
        [str(page["plan"]) for page in finalists],
        lambda plan, steps: pool.play(plan, steps=steps).seconds,
        steps=_STEPS,
        budget_seconds=auto.try_seconds,
    )
    pages = {page["plan"]: page for page in finalists}
    tried = [
        {**pages[entry.plan], "tried_seconds": entry.seconds, "tried_ratio": entry.ratio, "num_turns": len(entry.turns)}
        for entry in halving.entries
        if not entry.problem
    ]
    failed = {entry.plan: str(entry.problem).splitlines()[0] for entry in halving.entries if entry.problem}
    if not tried:
        plan, problem = next(iter(failed.items()))
        raise RunError(f"none of the {len(failed)} best plans can make a step here; {plan}: {problem}")
    spoken_for = {page["plan"] for page in tried} | set(failed)
    rest = [page for page in decision.ranked if page["plan"] not in spoken_for]
    rest += [page for page in finalists if page["plan"] in failed]
    remarks = (*decision.remarks, *(f"{plan} was tried and failed: {problem}" for plan, problem in failed.items()))
    rounds = f"{halving.num_rounds} round{'' if halving.num_rounds == 1 else 's'}"
    told = f"tried for {rounds} of {_STEPS} real steps in {halving.seconds:.0f} s, until {halving.why}"
    return replace(decision, ranked=(*tried, *rest), tried=told, remarks=remarks)


def asks_auto(path: Path, plan: str | None, overrides: Sequence[str]) -> bool:
    """True where the command line or the recipe leaves the plan to us."""
    text = plan if plan is not None else load_recipe(path, overrides).plan
    return text.strip() == AUTO


def decide_for_run(
    path: Path, *, overrides: Sequence[str], num_processes: int | None, run_dir: Path | None, resume: bool
) -> tuple[str, Decision | None]:
    """The plan of a run that is to be picked: that of the run which goes on, or a fresh pick.

    Raises:
        RequestError: no plan fits.
    """
    recipe = load_recipe(path, overrides)
    if resume and run_dir is not None and (run_dir / "plan.json").exists():
        plan = read_plan(run_dir)
        _tell(f"plan auto: going on with the plan of the run, {plan}")
        return plan, None
    if resume and run_dir is None:
        raise RequestError("--resume with plan 'auto' needs --run-dir: the plan of the run is kept there")
    decision = pick(recipe, num_processes)
    for line in decision.describe():
        _tell(line)
    return decision.plan, decision


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
