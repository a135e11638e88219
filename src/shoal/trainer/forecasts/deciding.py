"""Asks for a plan and says what was found: the launcher's side of ``--plan auto`` and of ``shoal tune``. No torch."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.elastic.pool import Pool
from shoal.planner.machine import default_path, num_cores
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.forecasts.calibrating import find_machine
from shoal.trainer.forecasts.trial import Trial
from shoal.trainer.layout import default_threads

AUTO = "auto"
_UNSURE = 1.25
"""Plans that are predicted within this of the best are tried for real: predictions of single plans are up to a fifth off."""
_FINALISTS = 5
_STEPS = 6
_DEADLINE = 900.0
_BUDGET = 45.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Plans by predicted time, and what the numbers are made of."""

    ranked: tuple[dict[str, Any], ...]
    """``plan``, ``seconds``, ``compute_seconds``, ``communication_seconds``, ``bubble``, and ``ranks``: what each will move and
    hold; the best first. ``tried_seconds`` where it was tried for real."""
    num_legal: int
    seconds: float
    machine: str
    """Where the machine's constants are from."""
    remarks: tuple[str, ...]

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
        tried_plans = [page for page in self.ranked if "tried_seconds" in page]
        if tried_plans:
            each = ", ".join(f"{page['plan']} {page['tried_seconds'] * 1e3:.1f} ms" for page in tried_plans)
            lines.append(f"  tried for {_STEPS} real steps each, being close in the prediction: {each}")
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


def _how_much_slower(best: dict[str, Any], other: dict[str, Any]) -> str:
    """By real steps where both were tried, which say no reason; else by the prediction, which does."""
    if "tried_seconds" in best and "tried_seconds" in other:
        return f"{other['tried_seconds'] / best['tried_seconds'] - 1:.1%} slower in real steps"
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
    budget: float = _BUDGET,
) -> Decision:
    """Rank the legal plans of a recipe on this machine, or time the plans that are named.

    Args:
        recipe: as it would be trained.
        num_processes: of every plan; of the plans that are named, or as many as there are cores, when left out.
        machine: the machine file; the user's own when left out.
        plans: to be timed in place of a search.
        budget: seconds after which the search stops.

    Raises:
        RequestError: no plan fits, or the machine file is wrong.
        RunError: a process that looks died.
    """
    count = num_processes or (Plan.parse(plans[0]).world_size if plans else num_cores())
    _, origin = find_machine(machine, num_processes=count, tell=_tell)
    threads = recipe.train.threads or default_threads(count)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-rehearsal-") as folder,
        Pool("shoal.trainer.forecasts.decider", count, threads=threads, called="planner") as pool,
    ):
        job = {
            "recipe": recipe.model_dump(mode="json"),
            "machine": str(machine or default_path()),
            "folder": folder,
            "plans": list(plans),
            "budget": budget,
        }
        answer = pool.run(job, deadline_seconds=_DEADLINE)[0]
    if "no_plan" in answer:
        raise RequestError(answer["no_plan"])
    return Decision(
        ranked=tuple(answer["ranked"]),
        num_legal=answer["num_legal"],
        seconds=answer["seconds"],
        machine=origin,
        remarks=tuple(answer["remarks"]),
    )


def pick(recipe: Recipe, num_processes: int | None, *, machine: Path | None = None) -> Decision:
    """The plan to run: the best predicted ones are tried for a few real steps each, and the fastest of them comes first.

    Raises:
        RequestError: no plan fits, or the machine file is wrong.
        RunError: a process that looks died.
    """
    decision = decide(recipe, num_processes, machine=machine)
    limit = decision.ranked[0]["seconds"] * _UNSURE
    num_close = sum(page["seconds"] <= limit for page in decision.ranked)
    finalists = decision.ranked[: min(_FINALISTS, max(2, num_close))]
    if len(finalists) < 2:
        return decision
    with Trial(recipe, Plan.parse(decision.plan).world_size) as trial:
        tried = {one.plan: one for one in trial.run([page["plan"] for page in finalists], steps=_STEPS)}
    pages = [{**page, "tried_seconds": tried[page["plan"]].median} for page in finalists]
    pages = [page for page in pages if not tried[page["plan"]].problem]
    pages.sort(key=lambda page: float(page["tried_seconds"]))
    if not pages:
        return decision
    rest = [page for page in decision.ranked if all(page["plan"] != one["plan"] for one in pages)]
    return replace(decision, ranked=(*pages, *rest))


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
