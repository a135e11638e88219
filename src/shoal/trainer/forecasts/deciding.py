"""Asks for a plan and says what was found: the launcher's side of ``--plan auto`` and of ``shoal tune``. No torch."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.elastic.pool import Pool
from shoal.planner.machine import default_path, num_cores
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.forecasts.calibrating import find_machine
from shoal.trainer.layout import default_threads

AUTO = "auto"
_DEADLINE = 900.0
_BUDGET = 45.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Plans by predicted time, and what the numbers are made of."""

    ranked: tuple[dict[str, Any], ...]
    """``plan``, ``seconds``, ``compute_seconds``, ``communication_seconds``, ``bubble``; the best first."""
    num_legal: int
    seconds: float
    machine: str
    """Where the machine's constants are from."""
    remarks: tuple[str, ...]
    ranks: tuple[dict[str, Any], ...] = ()
    """Of the best plan: what every rank will move and hold."""

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
            slower = second["seconds"] / best["seconds"] - 1
            lines.append(f"  runner-up: {second['plan']}, {slower:.1%} slower: {_why(best, second)}")
        lines.append(f"  constants: {self.machine}")
        lines.append("  asynchronous schedules and parameter servers are never picked: they change what is computed")
        return lines + [f"  {remark}" for remark in self.remarks]

    def page(self) -> dict[str, Any]:
        """What is kept beside the run: ``forecast.json``."""
        return {
            **self.ranked[0],
            "machine": self.machine,
            "ranks": list(self.ranks),
            "runner_up": self.ranked[1] if len(self.ranked) > 1 else None,
        }


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
        ranks=tuple(answer["ranks"]),
    )


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
    decision = decide(recipe, num_processes)
    for line in decision.describe():
        _tell(line)
    return decision.plan, decision


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
