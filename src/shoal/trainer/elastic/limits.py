"""What ``elastic.mode = "shrink"`` cannot do yet, refused by name before a process starts. No torch."""

from collections.abc import Iterator, Sequence

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.resolve import refuse_absent_replicas
from shoal.launch.hosts.hostspec import HostSlots
from shoal.trainer.config import Recipe

FIX = "set elastic.mode to restart"


def refuse_elastic(recipe: Recipe, plan: Plan) -> None:
    """Refuse settings that replicas cannot follow when they compute the shares of absent ones.

    Raises:
        RequestError: says which, and what to do.
    """
    if recipe.elastic.mode != "shrink":
        return
    refuse_absent_replicas(plan)
    problems = {
        f"optim.adapt {recipe.optim.adapt} measures the gradients of microbatches where they are computed": (
            recipe.optim.adapt != "none"
        ),
        "elastic.batch scale counts its length in steps, whose samples are not known beforehand; set train.steps": (
            recipe.elastic.batch == "scale" and recipe.train.steps is None
        ),
        f"checkpoint.place {recipe.checkpoint.place} is for ranks that stay the same": (
            recipe.checkpoint.place not in ("auto", "shared", "first")
        ),
        f"compression.weights {recipe.compression.weights} rounds by how weights are cut": (
            recipe.compression.weights != "none"
        ),
    }
    for problem, is_asked in problems.items():
        if is_asked:
            raise RequestError(f"elastic.mode shrink: {problem}; leave it out, or {FIX}")


def elastic_warnings(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What an elastic run of these settings is slow at."""
    elastic, dp = recipe.elastic, plan.dp or 1
    is_one_each = elastic.replicas_at_start(dp) == dp
    if elastic.mode == "shrink" and elastic.batch == "hold" and not elastic.spares and is_one_each and dp > 1:
        yield (
            f"elastic.mode shrink with a replica for each of the {dp} shares of the batch: while one is missing every step takes "
            "twice as long, and over a month of failures that loses more than restarts do (simulated: 0.79 against 0.93 of the "
            f"work, benchmarks/goodput); let each replica have several shares (plan dp={4 * dp}, elastic.max_dp {dp}), or set "
            "elastic.spares, or elastic.batch to scale"
        )


def refuse_elastic_launched(recipe: Recipe) -> None:
    """Refuse a run that is to go on without its dead where something else than Shoal starts, and ends, its ranks.

    Raises:
        RequestError: says what to start it with.
    """
    if recipe.elastic.mode == "shrink":
        raise RequestError(
            "elastic.mode shrink needs an agent of Shoal's on every host, which keeps the others when a rank dies; torchrun, "
            "SLURM, MPI, Ray, Kubernetes and other launchers start the ranks themselves: start the run with `shoal train RECIPE "
            f"--hosts a:N,b:N` (without --on, and outside of a launcher), or {FIX}"
        )


def refuse_elastic_hosts(recipe: Recipe, plan: Plan, hosts: Sequence[HostSlots]) -> None:
    """Refuse what ranks of several hosts cannot do when some of them die.

    Raises:
        RequestError: says which, and what to do.
    """
    elastic, size = recipe.elastic, plan.ranks_per_replica
    at_start, room = elastic.replicas_at_start(plan.dp or 1) * size, sum(host.slots for host in hosts)
    if elastic.spares and room < at_start + elastic.spares * size:
        raise RequestError(
            f"elastic.spares {elastic.spares}: the run begins with {at_start} ranks, spares need {elastic.spares * size} more, "
            f"and the hosts have room for {room}; give hosts more room, or name a further host, or set elastic.rejoin instead"
        )
    for host in hosts:
        if host.slots % size:
            raise RequestError(
                f"elastic.mode shrink: a replica of {str(plan)!r} has {size} ranks, which fail as one, and host {host.name} has "
                f"{host.slots} ranks; give every host a multiple of {size}"
            )
