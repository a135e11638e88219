"""A process that plays one rank of one plan after another: rehearsed, with echoing channels, or for real with its peers.

There are as many as a plan has ranks, and they serve a ``Cast`` (``cast.py``) for many jobs: importing torch and building the
model and the data cost seconds, which a plan that is played for half a second must not pay. A job that asks for more memory than
there is fails in this process, by a limit on what it may take; and where the kernel is quicker, it takes this process first.
"""

import gc
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.trafficcounter import traffic_rows
from shoal.comm.world import join_world
from shoal.core.plan import Plan
from shoal.launch.pool import serve
from shoal.telemetry.headroom import limited_growth, offer_to_the_kernel
from shoal.telemetry.memory import rss_bytes
from shoal.trainer.config import Recipe
from shoal.tuning.company import Company
from shoal.tuning.forecast import read_trace
from shoal.tuning.legal import legal_plans
from shoal.tuning.rehearsal import Subject, build_subject, trace_rank


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a job says; see ``Cast`` for the three kinds."""
    torch.set_num_threads(job["threads"])
    try:
        return _do(job)
    finally:
        # Models and their hooks refer to each other. The next plan needs the memory, and must not compute beside the threads of
        # groups that nobody uses any more: each of gloo's wakes a hundred times a second.
        gc.collect()


def _do(job: Mapping[str, Any]) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with limited_growth(job["most_bytes"]):
        subject, loaded = _subject(Recipe.model_validate(job["recipe"]).model_dump_json())
        if job["kind"] == "legal":
            return {"plans": [str(plan) for plan in legal_plans(subject, job["count"])] if rank == 0 else []}
        plan = Plan.parse(job["plan"])
        store = FileStore(str(Path(job["folder"]) / job["store"]), size)
        if job["kind"] == "rehearse":
            company = Company(store, rank=rank, size=size, threads=job["threads"], num_timed=job["steps"])
            return {"loaded_bytes": loaded, **company.rehearse(subject, plan)}
        return _play(subject, plan, store, job)


def _play(subject: Subject, plan: Plan, store: FileStore, job: Mapping[str, Any]) -> dict[str, Any]:
    """Real steps of a plan, with the peers."""
    world = join_world(os.environ, deadline_seconds=job["deadline_seconds"], store=store)
    try:
        world.barrier()
        trace = trace_rank(subject, plan, world=world, num_steps=job["steps"])
        seen = read_trace(trace)
        world.barrier()
    finally:
        world.close()
    return {
        "seconds": [step.seconds for step in trace.steps],
        "cells": [step.cell_seconds for step in trace.steps],
        "traffic": traffic_rows(seen.traffic),
        "state": dict(seen.state),
    }


@cache
def _subject(recipe: str) -> tuple[Subject, int]:
    """Model and data of a recipe, and the bytes that are neither the model's nor were there before."""
    before = rss_bytes()
    subject = build_subject(Recipe.model_validate_json(recipe))
    # The model itself is counted with the rank that it becomes.
    return subject, max(0, rss_bytes() - before - sum(weight.nbytes for weight in subject.model.parameters()))


def main() -> None:
    """Entry point: serves jobs until nobody asks."""
    offer_to_the_kernel()
    serve(lambda job: run_job(job))


if __name__ == "__main__":
    main()
