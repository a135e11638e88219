"""Loss and accuracy over a held-out split, shared out over the ranks; every sample counts once however many ranks there are."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.comm.global_batch import ALONE, gathering
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.data.batchform import call_model, targets_of
from shoal.data.loader import Microbatch
from shoal.data.order import replica_share
from shoal.data.source import Source
from shoal.engine.empty import ANY_SAMPLE
from shoal.engine.objective import Objective, kind_of
from shoal.pipeline.runtime import Runtime

_SENT_AT_ONCE = 8
"""Batches after which a pipeline waits for what it has sent: it is in memory until then."""


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
    mesh: Mesh,
    batch: int,
    limit: int = 0,
    before_batch: Callable[[], None] = lambda: None,
    runtime: Runtime | None = None,
) -> Evaluation:
    """Mean loss over the first ``limit`` samples of a split (0: all of them), weighted by items as in training.

    ``before_batch`` is called before each forward pass, so that a long evaluation can say that it moves. ``runtime`` takes a
    batch through the stages of a pipeline, where there is one.
    """
    started = time.perf_counter()
    count = min(len(source), limit) if limit else len(source)
    ids = replica_share(np.arange(count, dtype=np.int64), mesh.coordinate(Axis.DATA), mesh.degree(Axis.DATA))
    num_rounds = math.ceil(math.ceil(count / mesh.degree(Axis.DATA)) / batch)
    sums = torch.zeros(4, dtype=torch.float64)  # loss, weight, correct, counted
    # Each module's own mode, because the user may have frozen some: a layer in eval mode must still be in it afterwards.
    modes = [(module, module.training) for module in objective.modules()]
    objective.eval()
    # A loss over a batch is over an evaluation batch: replicas have different numbers of them.
    with torch.no_grad(), gathering(ALONE):
        for start in range(0, num_rounds * batch, batch):
            before_batch()
            own = ids[start : start + batch]
            if len(own):
                sums += _evaluate_batch(objective, source, own, runtime)
            else:
                # A replica whose share is done still runs: gathering sharded weights takes all of them.
                _evaluate_batch(objective, source, ANY_SAMPLE, runtime)
            if runtime is not None and start // batch % _SENT_AT_ONCE == 0:
                runtime.settle()
    if runtime is not None:
        runtime.settle()
    for module, was_training in modes:
        module.training = was_training
    if mesh.coordinate(Axis.TENSOR) > 0:
        sums.zero_()  # Tensor-parallel ranks all found the same; the first one tells it.
    loss, weight, correct, counted = mesh.everyone.all_reduce_(sums.to(objective.device)).tolist()
    return Evaluation(
        split=split,
        loss=loss / max(weight, 1.0),
        accuracy=correct / counted if counted else None,
        samples=count,
        seconds=time.perf_counter() - started,
    )


def _evaluate_batch(objective: Objective, source: Source, ids: np.ndarray, runtime: Runtime | None) -> torch.Tensor:
    items = source.collate(ids)
    microbatch = Microbatch.of(items, ids)
    inputs, targets = objective.prepare(microbatch)
    with objective.computing():
        ends_here, output = (
            runtime.infer(inputs, kind_of(microbatch))
            if runtime is not None
            else (True, call_model(objective.model, inputs))
        )
    targets, weight = objective.scoring.own_part(targets, microbatch.weight)
    if weight == 0 or not ends_here:
        return torch.zeros(4, dtype=torch.float64)
    with objective.precision.autocast(objective.device.type):
        wanted = targets_of(microbatch.form, inputs, targets)
        loss = objective.call_loss(output, wanted)
    found = objective.scoring.count_correct(output, wanted)
    correct, counted = found if found is not None else (0, 0)
    # Ranks that gathered the whole sequence each count a part of it.
    part = objective.scoring.factor
    numbers = [float(loss) * weight * part, weight * part, correct * part, counted * part]
    return torch.tensor(numbers, dtype=torch.float64)
