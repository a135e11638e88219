"""One rank of a trial: takes some real steps of one plan after another, with its peers, and says how long each took.

Started through a ``Pool`` by ``trainer/forecasts/trial.py``. Each job joins a group of its own, so one process serves many plans.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.world import join_world
from shoal.core.plan import Plan
from shoal.elastic.jobs import serve
from shoal.trainer.config import Recipe
from shoal.trainer.forecasts.forecast import account_rows, read_trace
from shoal.trainer.forecasts.rehearsal import Subject, build_subject, trace_rank


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Take the steps of a job's plan."""
    torch.set_num_threads(job["threads"])
    subject = _subject(Recipe.model_validate(job["recipe"]).model_dump_json())
    store = FileStore(str(Path(job["folder"]) / job["store"]), int(os.environ["WORLD_SIZE"]))
    world = join_world(os.environ, deadline_seconds=job["deadline_seconds"], store=store)
    try:
        world.barrier()
        trace = trace_rank(subject, Plan.parse(job["plan"]), world=world, num_steps=job["steps"])
        seen = read_trace(trace)
        world.barrier()
    finally:
        world.close()
    return {
        "seconds": [step.seconds for step in trace.steps],
        "traffic": account_rows(seen.traffic),
        "state": dict(seen.state),
    }


@cache
def _subject(recipe: str) -> Subject:
    return build_subject(Recipe.model_validate_json(recipe))


def main() -> None:
    """Entry point: serves jobs."""
    serve(lambda job: run_job(job))


if __name__ == "__main__":
    main()
