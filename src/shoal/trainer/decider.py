"""The process that looks for a plan: it needs torch and a lot of memory for a while, and the launcher stays without both.

Started through a ``Pool`` of one by ``trainer/deciding.py``; answers with a page of JSON.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.plan import Plan
from shoal.elastic.jobs import serve
from shoal.planner.machine import read_machine
from shoal.trainer.auto import Choice, pick_plan
from shoal.trainer.config import Recipe
from shoal.trainer.forecast import account_rows, forecast_ranks
from shoal.trainer.localtime import Clock, PlanTime
from shoal.trainer.rehearsal import Subject, build_subject


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Rank the legal plans of a job's recipe, or time the plans that it names; forecast the first of them in full."""
    subject = build_subject(Recipe.model_validate(job["recipe"]))
    clock = Clock(subject, read_machine(Path(job["machine"])))
    if job["plans"]:
        timed = [clock.predict(Plan.parse(plan)) for plan in job["plans"]]
        choice = Choice(ranked=tuple(timed), num_legal=len(timed), seconds=0.0)
    else:
        choice = pick_plan(clock, job["processes"], budget_seconds=job["budget"])
    page = {
        "ranked": [describe_time(timed) for timed in choice.ranked],
        "num_legal": choice.num_legal,
        "seconds": choice.seconds,
        "remarks": list(choice.remarks),
        "refused": choice.refused,
    }
    return {**page, "ranks": forecast_rows(subject, choice.best.plan)} if job["forecasts"] else page


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
    }


def forecast_rows(subject: Subject, plan: Plan) -> list[dict[str, Any]]:
    """What every rank will move and hold, as JSON."""
    return [
        {"state_bytes": dict(rank.state), "traffic": account_rows(rank.traffic)}
        for rank in forecast_ranks(subject, plan)
    ]


if __name__ == "__main__":
    serve(lambda job: run_job(job))
