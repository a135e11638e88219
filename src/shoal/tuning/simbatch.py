"""The batch of a simulation: the recipe's, or the next one that the plan's replicas and microbatches can share out. No torch.

A recipe's batch is made for the processes that train it, and a simulation has as many devices as somebody asks for. A batch that
is asked for too is held to the plan.
"""

from collections.abc import Sequence

from shoal.core.axes import Axis
from shoal.core.combine import divisors
from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE
from shoal.core.plan import Plan
from shoal.engine.config import TrainConfig
from shoal.planner.job import MOST_SAMPLES
from shoal.planner.simulation.bounds import MOST_CELLS, count_cells
from shoal.schedules.find import fitting_microbatches
from shoal.trainer.config import Recipe


def is_batch_given(overrides: Sequence[str]) -> bool:
    """Whether the command line says the batch."""
    return any(override.partition("=")[0].strip() == "train.global_batch" for override in overrides)


def share_batch(recipe: Recipe, plan: Plan, *, is_given: bool) -> tuple[Recipe, str | None]:
    """The recipe with a batch that its plan can share out, and what to say about it where that is not the recipe's.

    Args:
        recipe: what is simulated.
        plan: how; its replicas are said.
        is_given: somebody asks for this very batch.

    Raises:
        RequestError: the batch is asked for and cannot be shared out, or the one that can be is too large.
    """
    train = recipe.train
    if is_given:
        _check_batch(train.global_batch, plan)
        return recipe, None
    replicas = plan.degree(Axis.DATA)
    if train.global_batch % (replicas * (plan.microbatches or 1) * (train.micro_batch or 1)) == 0:
        return recipe, None
    batch = fitting_batch(train, plan)
    if batch > MOST_SAMPLES:
        raise RequestError(
            f"plan {str(plan)!r}: its {replicas} replicas need a global batch of {batch} for their microbatches, and "
            f"{MOST_SAMPLES} is the most; give fewer microbatches, a smaller train.micro_batch, or fewer --devices"
        )
    found = recipe.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})
    return found, (
        f"the recipe's global batch of {train.global_batch} cannot be shared out over {_sharers(train, plan)}: {batch} is "
        f"simulated; --global-batch says another"
    )


def fitting_batch(train: TrainConfig, plan: Plan) -> int:
    """The smallest batch, from the recipe's own on, in which every replica has whole microbatches, as many as fill a pipeline."""
    replicas = plan.degree(Axis.DATA)
    each = replicas * (plan.microbatches or _filling(plan)) * (train.micro_batch or 1)
    if plan.microbatches is not None and train.micro_batch is not None:
        # Both numbers are said, and their product is the share of a replica: no multiple of it would be.
        return each
    return each * max(1, -(-train.global_batch // each))


def named_microbatches(train: TrainConfig, plan: Plan) -> int:
    """Those that the plan or the recipe names, before a schedule is made of them; what is derived is few."""
    share = train.global_batch // plan.degree(Axis.DATA)
    if plan.microbatches is not None:
        return min(plan.microbatches, share)
    return max(1, share // train.micro_batch) if train.micro_batch is not None else 1


def _filling(plan: Plan) -> int:
    """Microbatches of a replica where nobody says; one where a schedule that is full has too many cells to be played."""
    if plan.pp == 1 or count_cells(plan, 4 * plan.pp) > MOST_CELLS:
        return 1
    name = plan.schedule or DEFAULT_SCHEDULE
    return fitting_microbatches(name, ranks=plan.pp, samples=None, chunks=plan.chunks, replicas=plan.stage_replicas)


def _sharers(train: TrainConfig, plan: Plan) -> str:
    words = [f"{plan.degree(Axis.DATA)} replica(s)"]
    if plan.microbatches is not None:
        words.append(f"{plan.microbatches} microbatch(es)")
    if train.micro_batch is not None:
        words.append(f"{train.micro_batch} sample(s) each")
    return " x ".join(words)


def _check_batch(batch: int, plan: Plan) -> None:
    """Refuse a batch that the replicas cannot share out, in the options of a simulation: its devices are as easily changed.

    Raises:
        RequestError: both numbers, the nearest batches, and the most devices that this batch is enough for.
    """
    replicas = plan.degree(Axis.DATA)
    if batch % replicas == 0:
        return
    smaller = batch - batch % replicas
    enough = max(one for one in divisors(batch) if one <= replicas)
    batches = " or ".join(str(size) for size in (smaller, smaller + replicas) if size)
    raise RequestError(
        f"plan {str(plan)!r}: a global batch of {batch} cannot be shared out evenly over its {replicas} replicas; give "
        f"--global-batch {batches}, or dp={enough} on --devices {enough * plan.ranks_per_replica}"
    )
