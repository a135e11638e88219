"""Plan choice on this machine: what ``--plan auto``, ``--forecast`` and ``shoal tune`` ask for. No torch."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.engine.resolve import check_processes
from shoal.planner.hardware.machine import Machine, num_cores
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe, load_recipe
from shoal.tuning.calibration import find_machine
from shoal.tuning.rehearsal_pool import Page, RehearsalPool
from shoal.tuning.search import PlanChoice, choose_finalists, search_plans
from shoal.tuning.successive_halving import halve_plans

AUTO = "auto"
_UNSURE = 1.25
"""Plans that are predicted within this of the best are tried for real: predictions of single plans are up to a fifth off."""
_FEWEST = 2
_STEPS = 3
"""Real steps of a turn."""
Log = Callable[[str], None]


@contextmanager
def open_pool(
    recipe: Recipe, num_processes: int | None, *, machine: Path | None = None, log: Log
) -> Iterator[tuple[RehearsalPool, Machine, str]]:
    """Processes to rehearse plans of a recipe, the machine's constants, and where these are from.

    Args:
        recipe: as it would be trained.
        num_processes: of every plan; as many as there are cores when left out.
        machine: the machine file; the user's own when left out.
        log: given lines for people.

    Raises:
        RequestError: no plan fits, or the machine file is wrong.
    """
    count = num_processes or num_cores()
    check_processes(count)
    found, origin = find_machine(machine, num_processes=count, log=log, before=partial(_require_plans, recipe, count))
    with RehearsalPool(recipe, count) as pool:
        yield pool, found, origin


def forecast_plan(recipe: Recipe, plan: Plan) -> Page:
    """What a run by a plan will take on this machine, with where the machine's constants are from.

    Raises:
        RequestError: the plan does not fit, has islands, or the machine file is wrong.
        RunError: a process that rehearses died.
    """
    if plan.sync != "allreduce":
        raise RequestError(
            f"plan {str(plan)!r}: steps of islands differ, for some end with a round of sync={plan.sync}, and one is "
            f"rehearsed for all; leave --forecast out, or play the rounds with `shoal simulate`"
        )
    machine, origin = find_machine(None, num_processes=plan.world_size, log=_log)
    return {**rehearse_plan(recipe, plan, machine), "machine": origin, "runner_up": None}


def rehearse_plan(recipe: Recipe, plan: Plan, machine: Machine) -> Page:
    """The predicted step of one plan.

    Raises:
        RequestError: the plan does not fit.
        RunError: a process that rehearses died.
    """
    check_processes(plan.world_size)
    with RehearsalPool(recipe, plan.world_size) as pool:
        return pool.rehearse(plan, machine)


def search(pool: RehearsalPool, machine: Machine, origin: str) -> PlanChoice:
    """Rank the legal plans that may be best, by rehearsing them.

    Raises:
        RequestError: no plan fits.
    """
    legal = pool.legal_plans()
    if not legal:
        raise _no_plan(pool.recipe, pool.num_processes)
    budget = pool.recipe.planner.auto.search_seconds
    return search_plans(legal, lambda plan: pool.rehearse(plan, machine), machine, origin=origin, budget_seconds=budget)


def _no_plan(recipe: Recipe, num_processes: int) -> RequestError:
    return RequestError(
        f"no plan for {num_processes} processes fits the model and global_batch {recipe.train.global_batch}; change --nproc or "
        f"train.global_batch"
    )


def _require_plans(recipe: Recipe, num_processes: int) -> None:
    """Ask one process whether there is a plan at all: it takes as long as building the model, and timing a machine half a minute.

    Raises:
        RequestError: no plan fits.
    """
    with RehearsalPool(recipe, 1) as pool:
        if not pool.legal_plans(num_processes):
            raise _no_plan(recipe, num_processes)


def pick(recipe: Recipe, num_processes: int | None) -> PlanChoice:
    """The plan to run: the best predicted ones are tried for real, and the fastest of them comes first.

    Raises:
        RequestError: no plan fits, or the machine file is wrong.
        RunError: a process that rehearses died.
    """
    auto = recipe.planner.auto
    with open_pool(recipe, num_processes, log=_log) as (pool, machine, origin):
        _log(
            f"plan auto: looking at plans for {pool.num_processes} processes, for at most {auto.search_seconds:g} s, and then "
            f"trying the best for at most {auto.try_seconds:g} s (planner.auto.search_seconds, try_seconds)"
        )
        return pick_from(pool, search(pool, machine, origin))


def pick_from(pool: RehearsalPool, choice: PlanChoice) -> PlanChoice:
    """Try the finalists of a search, on the processes that rehearsed them; the fastest comes first."""
    auto = pool.recipe.planner.auto
    finalists = choose_finalists(choice.ranked, most=auto.finalists, fewest=_FEWEST, unsure=_UNSURE)
    if len(finalists) < 2 or auto.try_seconds == 0:
        return choice
    halving = halve_plans(
        [str(page["plan"]) for page in finalists],
        lambda plan, steps: pool.play(plan, steps=steps),
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
    rest = [page for page in choice.ranked if page["plan"] not in spoken_for]
    rest += [page for page in finalists if page["plan"] in failed]
    warnings = (*choice.warnings, *(f"{plan} was tried and failed: {problem}" for plan, problem in failed.items()))
    rounds = f"{halving.num_rounds} round{'' if halving.num_rounds == 1 else 's'}"
    summary = f"tried for {rounds} of {_STEPS} real steps in {halving.seconds:.0f} s, until {halving.why}"
    return replace(choice, ranked=(*tried, *rest), tried=summary, warnings=warnings)


def asks_auto(path: Path, plan: str | None, overrides: Sequence[str]) -> bool:
    """True where the command line or the recipe leaves the plan to us."""
    text = plan if plan is not None else load_recipe(path, overrides).plan
    return text.strip() == AUTO


def choose_for_run(
    path: Path, *, overrides: Sequence[str], num_processes: int | None, run_dir: Path | None, resume: bool
) -> tuple[str, Page | None]:
    """The plan of a run that is to be picked, and its forecast: that of the run which goes on, or a fresh pick.

    Raises:
        RequestError: no plan fits.
    """
    recipe = load_recipe(path, overrides)
    if resume and run_dir is not None and (run_dir / "plan.json").exists():
        plan = read_plan(run_dir)
        _log(f"plan auto: going on with the plan of the run, {plan}")
        return plan, None
    if resume and run_dir is None:
        raise RequestError("--resume with plan 'auto' needs --run-dir: the plan of the run is kept there")
    choice = pick(recipe, num_processes)
    for line in choice.describe():
        _log(line)
    return choice.plan, choice.page()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
