"""A process that looks for a plan: there are as many as the plan has ranks, and they need torch, which the launcher does without.

Started through a ``Pool`` by ``deciding.py``. All rehearse, each its own rank (``company.py``); the first decides what is
rehearsed next, and answers with a page of JSON.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.elastic.jobs import serve
from shoal.planner.machine import read_machine
from shoal.telemetry.memory import rss_bytes
from shoal.trainer.config import Recipe
from shoal.trainer.forecasts.auto import Choice, pick_plan
from shoal.trainer.forecasts.company import Company
from shoal.trainer.forecasts.forecast import account_rows
from shoal.trainer.forecasts.localtime import Clock, PlanTime
from shoal.trainer.forecasts.rehearsal import build_subject
from shoal.trainer.layout import default_threads


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Rank the legal plans of a job's recipe, or time the plans that it names."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recipe = Recipe.model_validate(job["recipe"])
    store = FileStore(str(Path(job["folder"]) / "store"), size)
    company = Company(store, rank=rank, size=size, threads=recipe.train.threads or default_threads(size))
    try:
        before = rss_bytes()
        subject = build_subject(recipe)
        # Data and what it was made with; the model itself is counted with the rank that it becomes.
        loaded = max(0, rss_bytes() - before - sum(weight.nbytes for weight in subject.model.parameters()))
        if rank > 0:
            company.follow(subject)
            return {}
        clock = Clock(subject, read_machine(Path(job["machine"])), company, loaded_bytes=loaded)
        if job["plans"]:
            timed = [clock.predict(Plan.parse(plan)) for plan in job["plans"]]
            choice = Choice(ranked=tuple(timed), num_legal=len(timed), seconds=0.0)
        else:
            choice = pick_plan(clock, size, budget_seconds=job["budget"])
    except RequestError as refusal:
        # Said by the first process alone: a pool takes what only some processes refuse for a failure.
        return {"no_plan": str(refusal)}
    finally:
        if rank == 0:
            company.end()
    return {
        "ranked": [describe_time(timed) for timed in choice.ranked],
        "num_legal": choice.num_legal,
        "seconds": choice.seconds,
        "remarks": list(choice.remarks),
        "refused": choice.refused,
    }


def describe_time(timed: PlanTime) -> dict[str, Any]:
    """A prediction as JSON."""
    time = timed.time
    return {
        "plan": str(timed.plan),
        "seconds": time.seconds,
        "compute_seconds": time.compute,
        "communication_seconds": dict(time.communication),
        "bubble": time.bubble,
        "fixed_seconds": time.fixed,
        "ranks": forecast_rows(timed),
    }


def forecast_rows(timed: PlanTime) -> list[dict[str, Any]]:
    """What every rank will move and hold, as JSON."""
    return [
        {"state_bytes": dict(rank.state), "traffic": account_rows(rank.traffic), "peak_bytes": peak}
        for rank, peak in zip(timed.ranks, timed.peak_bytes, strict=True)
    ]


def main() -> None:
    """Entry point: serves jobs."""
    serve(lambda job: run_job(job))


if __name__ == "__main__":
    main()
