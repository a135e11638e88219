"""Loss and accuracy over a held-out split, shared out over the ranks; every sample counts once however many ranks there are."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.comm.world import World
from shoal.data.loader import Microbatch
from shoal.data.order import replica_share
from shoal.data.source import Source
from shoal.models.accuracy import count_correct
from shoal.trainer.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a pass over a split found."""

    split: str
    loss: float
    accuracy: float | None
    samples: int
    seconds: float


def evaluate(
    objective: Objective,
    source: Source,
    *,
    split: str,
    world: World,
    batch: int,
    limit: int = 0,
    before_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Mean loss over the first ``limit`` samples of a split (0: all of them), weighted by items as in training.

    ``before_batch`` is called before each forward pass, so that a long evaluation can say that it moves.
    """
    started = time.perf_counter()
    count = min(len(source), limit) if limit else len(source)
    ids = replica_share(np.arange(count, dtype=np.int64), world.rank, world.size)
    sums = torch.zeros(4, dtype=torch.float64)  # loss, weight, correct, counted
    # Each module's own mode, because the user may have frozen some: a layer in eval mode must still be in it afterwards.
    modes = [(module, module.training) for module in objective.modules()]
    objective.eval()
    with torch.no_grad():
        for start in range(0, len(ids), batch):
            before_batch()
            sums += _evaluate_batch(objective, source, ids[start : start + batch])
    for module, was_training in modes:
        module.training = was_training
    loss, weight, correct, counted = world.sum_(sums.to(world.device)).tolist()
    return Evaluation(
        split=split,
        loss=loss / max(weight, 1.0),
        accuracy=correct / counted if counted else None,
        samples=count,
        seconds=time.perf_counter() - started,
    )


def _evaluate_batch(objective: Objective, source: Source, ids: np.ndarray) -> torch.Tensor:
    items = source.collate(ids)
    if items.weight == 0:
        return torch.zeros(4, dtype=torch.float64)
    microbatch = Microbatch(inputs=items.inputs, targets=items.targets, sample_ids=ids, weight=float(items.weight))
    output, targets = objective.predict(microbatch)
    with objective.precision.autocast(objective.device.type):
        loss = objective.loss(output, targets)
    found = count_correct(output, targets)
    correct, counted = found if found is not None else (0, 0)
    return torch.tensor([float(loss) * items.weight, items.weight, correct, counted], dtype=torch.float64)
