"""A request to run a recipe on a cluster, checked and turned into a job, before anything is started or written.

No torch. What only the nodes can tell, data and files among it, is checked there by the first rank.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.launch.clusters.job import Job, arrange, name_job
from shoal.trainer.claim import check_claim, choose_run_dir, pin_data, require_run_dir
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.elastic.limits import refuse_elastic_launched
from shoal.trainer.request import TrainRequest, read_request

_HANDED_ON = ("PYTHONPATH",)
"""Variables without which the processes would find other modules than this one."""


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """A run to be started on a cluster."""

    job: Job
    recipe: Recipe
    plan: Plan
    run_dir: Path
    options: tuple[str, ...]
    """Of ``shoal train``, but for the recipe and the run directory."""


def prepare_cluster_run(request: TrainRequest, *, nodes: int | None, per_node: int | None) -> ClusterRun:
    """Check what can be checked here, and derive what was left open.

    Args:
        request: what to train.
        nodes: of the cluster; left out, as many as ``per_node`` and the plan come to.
        per_node: processes of each node.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    given = load_recipe(request.recipe, request.overrides)
    refuse_elastic_launched(given)
    text = request.plan if request.plan is not None else given.plan
    if text.strip() == "auto":
        raise RequestError(
            "plan 'auto' is picked for this machine; name a plan for the cluster (`shoal plan RECIPE --cluster "
            "NAME:NODESxDEVICES` ranks them)"
        )
    counted = request.num_processes
    if nodes is not None and per_node is not None:
        counted = nodes * per_node
        is_open = request.plan is None and Plan.parse(text).ps == 0
        _check_count(text, counted, is_open=is_open)
    recipe, plan, resolved = read_request(_with_processes(request, counted))
    found = arrange(resolved.plan.world_size, nodes=nodes, per_node=per_node)
    if plan.ps and plan.ranks_per_replica > 1:
        raise RequestError(
            f"plan {str(plan)!r}: a worker is a group of {plan.ranks_per_replica} processes, and on a cluster roles are one "
            "process each; leave tp, cp and pp out"
        )
    run_dir = choose_run_dir(request.recipe.stem, given=request.run_dir, resume=request.resume).resolve()
    if request.resume and not request.may_start:
        require_run_dir(run_dir)
    recipe = pin_data(recipe, RunDir(run_dir) if request.resume else None)
    check_claim(run_dir, recipe, resume=request.resume)
    options = ["--plan", str(plan)]
    for change in request.overrides:
        options += ["--set", change]
    if request.resume:
        options.append("--resume=auto" if request.may_start else "--resume")
    arguments = ("train", str(request.recipe.resolve()), *options, "--run-dir", str(run_dir))
    job = Job(
        name=name_job(run_dir.name),
        arguments=arguments,
        nodes=found[0],
        per_node=found[1],
        folder=Path.cwd(),
        environment={name: os.environ[name] for name in _HANDED_ON if os.environ.get(name)},
        survives_deaths=plan.ps > 0,
    )
    return ClusterRun(job=job, recipe=recipe, plan=resolved.plan, run_dir=run_dir, options=tuple(options))


def _with_processes(request: TrainRequest, count: int | None) -> TrainRequest:
    return TrainRequest(recipe=request.recipe, plan=request.plan, num_processes=count, overrides=request.overrides)


def _check_count(text: str, count: int, *, is_open: bool) -> None:
    """Refuse a plan for another number of processes, before its batch is held to that number."""
    plan = Plan.parse(text)
    if is_open or (plan.dp is None and not plan.ps) or (plan.ps and plan.workers is None):
        return  # the processes that are left over make replicas or workers
    if plan.world_size != count:
        raise RequestError(
            f"plan {text!r} has {plan.world_size} process(es), and --nodes times --per-node are {count}; change one of them"
        )
