"""How many samples a step takes where that changes during a run (``train.batch_schedule``), as pure functions. No torch.

The size of a microbatch stays what it was at the first step, and a step takes more of them: memory does not grow, and every plan
adds up the same parts. The data's position counts samples, so a change of the batch neither repeats nor skips one.

    [[0, 64], [2000, 128]]   64 samples in steps 0 to 1999, then 128
    "noise"                  global_batch, doubled while the gradient noise scale says that twice as many samples are not wasted
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.data.order import Position, take
from shoal.engine.config import TrainConfig
from shoal.optim.config import OptimConfig

_MOST_DOUBLINGS = 4
"""Of "noise", where ``train.batch_limit`` does not say."""


def batch_at(train: TrainConfig, step: int, level: int = 0) -> int:
    """Samples of a step, counted from 0, where its epoch has as many left.

    Args:
        train: the schedule.
        step: steps before this one.
        level: how often "noise" has doubled the batch so far.
    """
    if train.batch_schedule is None:
        return train.global_batch
    if train.batch_schedule == "noise":
        return train.global_batch << level
    return next(batch for first, batch in reversed(train.batch_schedule) if first <= step)


def all_batches(train: TrainConfig) -> tuple[int, ...]:
    """Every size that a step of the run may have, the first step's first."""
    if train.batch_schedule is None:
        return (train.global_batch,)
    if train.batch_schedule == "noise":
        limit = _limit(train)
        return tuple(train.global_batch << level for level in range(1 + int(math.log2(limit // train.global_batch))))
    return tuple(dict.fromkeys(batch for _, batch in train.batch_schedule))


def next_level(train: TrainConfig, steps: int, level: int, noise_scale: float | None) -> int:
    """The level of "noise" after so many steps: one more where a batch of twice the size is still not above the noise scale.

    Below the noise scale twice the samples save almost half of the steps, above it they save few (McCandlish et al. 2018, An
    Empirical Model of Large-Batch Training); doubling as it grows is the batch warm-up of arXiv 2505.23971. The batch never
    shrinks: the scale rises while the loss falls, and what it seems to fall by is noise.
    """
    batch = batch_at(train, steps, level)
    if train.batch_schedule != "noise" or steps % train.batch_every or noise_scale is None or 2 * batch > _limit(train):
        return level
    return level + 1 if noise_scale >= 2 * batch else level


def most_microbatches(train: TrainConfig, plan: Plan) -> int:
    """Microbatches of a replica in the largest step; ``plan`` is resolved, and has those of the first step."""
    return (plan.microbatches or 1) * max(all_batches(train)) // train.global_batch


def batch_plans(train: TrainConfig, plan: Plan, micro_batch: int, axis: str) -> Iterator[Plan]:
    """The plan of every batch but the first, with its microbatches, where the plan is a pipeline's.

    Raises:
        RequestError: whole microbatches of every replica do not make a batch up; says both numbers and the fix.
    """
    unit = plan.num_shares * micro_batch
    for batch in all_batches(train)[1:]:
        if batch % unit:
            below, each = batch - batch % unit, batch // plan.num_shares
            # No microbatch makes up a batch that the replicas do not share evenly.
            smaller = (
                f", or set train.micro_batch to {math.gcd(each, micro_batch)}" if batch % plan.num_shares == 0 else ""
            )
            raise RequestError(
                f"train.batch_schedule has a batch of {batch}, which is not a multiple of {unit}, {axis} {plan.num_shares} x the "
                f"microbatch of {micro_batch} samples that the run keeps; set it to "
                f"{' or '.join(str(size) for size in (below, below + unit) if size)}{smaller}"
            )
        if plan.pp > 1:
            yield replace(plan, microbatches=batch // unit)


def count_scheduled_steps(train: TrainConfig, *, num_samples: int, target: Position) -> int:
    """Steps until the data is at ``target`` or beyond it."""
    position, steps = Position(), 0
    while (position.epoch, position.offset) < (target.epoch, target.offset):
        _, position = take(position, num_samples, batch_at(train, steps))
        steps += 1
    return steps


def describe_batches(train: TrainConfig) -> str | None:
    """The schedule for people; None where the batch stays what it is."""
    if train.batch_schedule is None:
        return None
    how = "in more microbatches of the same size"
    if train.batch_schedule == "noise":
        return (
            f"train.batch_schedule noise: {train.global_batch} samples a step, doubled up to {_limit(train)} as the gradient "
            f"noise scale grows, looked at every {train.batch_every} steps, {how}"
        )
    sizes = ", ".join(f"{batch} from step {first}" for first, batch in train.batch_schedule)
    return f"train.batch_schedule: samples a step {sizes}, {how}"


def batch_problems(train: TrainConfig, optim: OptimConfig, plan: Plan) -> Iterator[str]:
    """What is wrong with ``train.batch_schedule`` under a plan, each with its fix."""
    if train.batch_schedule is None:
        return
    if plan.ps:
        yield (
            f"train.batch_schedule changes the batch of all replicas at one step, and the {plan.num_shares} workers of "
            f"ps={plan.ps} are at different steps; leave it out, or use a plan with dp"
        )
    elif plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        yield (
            f"train.batch_schedule needs a pipeline that is empty between two steps, and schedule={plan.schedule} never is; use "
            "schedule=1f1b, or leave batch_schedule out"
        )
    elif plan.with_islands.islands > 1:
        yield (
            f"train.batch_schedule with the {plan.with_islands.islands} islands of sync={plan.sync} is not proved and not there; "
            "leave one of the two out"
        )
    if train.batch_schedule == "noise" and optim.adapt not in ("noise", "adascale"):
        yield (
            f"train.batch_schedule noise follows the gradient noise scale, and optim.adapt {optim.adapt} does not measure it; "
            "set optim.adapt to noise, or give a list such as [[0, 64], [2000, 128]]"
        )
    if train.batch_schedule == "noise" and train.steps is None:
        yield (
            "train.batch_schedule noise is not known beforehand, so epochs and tokens cannot be counted in steps; set train.steps"
        )


def _limit(train: TrainConfig) -> int:
    return train.batch_limit or train.global_batch * 2**_MOST_DOUBLINGS
