"""A rehearsal worker: a process that takes steps of one rank of one plan after another, rehearsed or for real with its peers.

There are as many as a plan has ranks, and they serve a ``RehearsalPool`` for many jobs: importing torch and building the model
and the data cost seconds, which a plan that is timed for half a second must not pay. A job that asks for more memory than there
is fails in this process, by a limit on what it may take; and where the kernel is quicker, it takes this process first.
"""

import gc
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.world import join_world
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan, all_plans
from shoal.engine.resolve import check_samples, check_settings, resolve_plan
from shoal.launch.environments import read_place
from shoal.launch.pool import serve
from shoal.models.check import facts_of
from shoal.parallel.requirements import describe_facts
from shoal.telemetry.memory import limited_growth, offer_to_the_kernel, rss_bytes
from shoal.trainer.config import Recipe
from shoal.tuning.joint_rehearsal import JointRehearsal
from shoal.tuning.rehearsal import Subject, build_subject, trace_rank


def legal_plans(subject: Subject, num_processes: int) -> list[Plan]:
    """The synchronous plans over so many processes that the model and the recipe allow, derived; plain ones first."""
    recipe = subject.recipe
    facts = describe_facts(subject.analysis, subject.model)
    # A run is checked by what the recipe says of a model of ours: a single head is not seen by looking.
    said = facts_of(recipe.model, subject.data.spec)
    found: list[Plan] = []
    for plan in all_plans(num_processes, facts):
        if plan.recompute != "none" or (plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous):
            continue
        if said is not None and plan.problems(said):
            continue
        try:
            check_settings(recipe.train, plan)
            check_samples(num_samples=len(subject.data.train), replicas=plan.num_shares)
            derived = resolve_plan(recipe.train, plan).plan
        except RequestError:
            continue
        if derived not in found:
            found.append(derived)
    return found


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a job says; ``RehearsalPool`` has the three kinds."""
    torch.set_num_threads(job["threads"])
    try:
        return _do(job)
    finally:
        # Models and their hooks refer to each other. The next plan needs the memory, and must not compute beside the threads of
        # groups that nobody uses any more: each of gloo's wakes a hundred times a second.
        gc.collect()


def _do(job: Mapping[str, Any]) -> dict[str, Any]:
    place = read_place(os.environ)
    rank, size = place.rank, place.world_size
    with limited_growth(job["most_bytes"]):
        subject, loaded = _subject(Recipe.model_validate(job["recipe"]).model_dump_json())
        if job["kind"] == "legal":
            return {"plans": [str(plan) for plan in legal_plans(subject, job["count"])] if rank == 0 else []}
        plan = Plan.parse(job["plan"])
        store = FileStore(str(Path(job["folder"]) / job["store"]), size)
        if job["kind"] == "rehearse":
            rehearsal = JointRehearsal(store, rank=rank, size=size, threads=job["threads"], num_timed=job["steps"])
            return {"loaded_bytes": loaded, **rehearsal.rehearse(subject, plan)}
        return _play(subject, plan, store, job)


def _play(subject: Subject, plan: Plan, store: FileStore, job: Mapping[str, Any]) -> dict[str, Any]:
    """Real steps of a plan, with the peers."""
    world = join_world(read_place(os.environ), deadline_seconds=job["deadline_seconds"], store=store)
    try:
        world.barrier()
        trace = trace_rank(subject, plan, world=world, num_steps=job["steps"])
        world.barrier()
    finally:
        world.close()
    return {"seconds": [step.seconds for step in trace.steps]}


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
