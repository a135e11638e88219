"""Loss and accuracy over a held-out split, shared out over the ranks; every sample counts once however many ranks there are."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shoal.comm.carry import sum_rounds
from shoal.comm.global_batch import ALONE, gathering
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.events import Evaluated
from shoal.data.batchform import batch_of, call_model, targets_of
from shoal.data.loading.loader import Microbatch
from shoal.data.order import replica_share
from shoal.data.source import Source, Streamed
from shoal.engine.batches.empty import ANY_SAMPLE
from shoal.engine.metrics import GatheredMetric, Metric, MetricSums
from shoal.engine.objective import Objective, kind_of
from shoal.pipeline.runtime import Runtime

_SENT_AT_ONCE = 8
"""Batches after which a pipeline waits for what it has sent: it is in memory until then."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a pass over a split found."""

    split: str
    """What the samples are called in events, such as ``validation``."""
    loss: float
    """The mean over all items of the split."""
    accuracy: float | None
    """The share of right choices; None where targets are no classes."""
    samples: int
    """How many there were, over all ranks."""
    seconds: float
    """How long it took."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name: those that were asked for, and those of other weights, such as ``ema_loss``."""

    def with_variant(self, prefix: str, other: "Evaluation") -> "Evaluation":
        """With what was found with other weights, as metrics whose names begin with ``prefix`` and ``_``."""
        found = {"loss": other.loss, **other.metrics}
        if other.accuracy is not None:
            found["accuracy"] = other.accuracy
        renamed = {f"{prefix}_{name}": value for name, value in found.items()}
        return replace(self, metrics={**self.metrics, **renamed}, seconds=self.seconds + other.seconds)

    def as_event(self, step: int) -> Evaluated:
        """The event that says so; ``step`` is how many steps were taken before it."""
        return Evaluated(
            step=step,
            split=self.split,
            loss=self.loss,
            accuracy=self.accuracy,
            samples=self.samples,
            seconds=self.seconds,
            metrics=dict(self.metrics),
        )

    def value_of(self, metric: str) -> float | None:
        """The number of this name: ``loss``, ``accuracy`` or one of the metrics; None where there is none."""
        return {**self.metrics, "loss": self.loss, "accuracy": self.accuracy}.get(metric)


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
    metrics: Sequence[Metric] = (),
) -> Evaluation:
    """Mean loss over the first ``limit`` samples of a split (0: all of them), weighted by items as in training.

    ``before_batch`` is called before each forward pass, so that a long evaluation can say that it moves. ``runtime`` takes a
    batch through the stages of a pipeline, where there is one. ``metrics`` are computed besides.
    """
    started = time.perf_counter()
    count = min(len(source), limit) if limit else len(source)
    if isinstance(source, Streamed):
        count = source.count(count)
    everything = np.arange(count, dtype=np.int64)
    num_batches = math.ceil(math.ceil(count / mesh.num_logical) / batch)
    told = []
    measured = _open_sums(objective, metrics, count, mesh)
    # Each module's own mode, because the user may have frozen some: a layer in eval mode must still be in it afterwards.
    modes = [(module, module.training) for module in objective.modules()]
    objective.eval()
    # A loss over a batch is over an evaluation batch: replicas have different numbers of them.
    with torch.no_grad(), gathering(ALONE):
        for replica in mesh.rounds:
            share = replica_share(everything, replica, mesh.num_logical) if replica is not None else everything[:0]
            sums = torch.zeros(4, dtype=torch.float64)  # loss, weight, correct, counted
            for start in range(0, num_batches * batch, batch):
                before_batch()
                own = share[start : start + batch]
                if len(own):
                    sums += _evaluate_batch(objective, source, own, runtime, measured)
                else:
                    # A replica whose share is done still runs: gathering sharded weights takes all of them.
                    _evaluate_batch(objective, source, ANY_SAMPLE, runtime)
                if runtime is not None and start // batch % _SENT_AT_ONCE == 0:
                    runtime.settle()
            if runtime is not None:
                runtime.settle()
            if mesh.coordinate(Axis.TENSOR) > 0:
                sums.zero_()  # Tensor-parallel ranks all found the same; the first one tells it.
            told.append(sums.to(objective.device))
    for module, was_training in modes:
        module.training = was_training
    loss, weight, correct, counted = sum_rounds(told, mesh.everyone).tolist()
    return Evaluation(
        split=split,
        loss=loss / max(weight, 1.0),
        accuracy=correct / counted if counted else None,
        samples=count,
        seconds=time.perf_counter() - started,
        metrics=measured.finish() if measured is not None else {},
    )


def _open_sums(objective: Objective, metrics: Sequence[Metric], count: int, mesh: Mesh) -> MetricSums | None:
    if not metrics:
        return None
    scoring = objective.scoring
    if scoring.step is not None:
        raise RunError(
            "metrics of an evaluation are made of the model's output, which a step of your own keeps to itself; return them "
            "beside the loss, or give loss=function(output, batch)"
        )
    if not scoring.has_whole_sequence and any(isinstance(metric, GatheredMetric) for metric in metrics):
        raise RunError(
            "a metric of all outputs needs whole ones, and under cp a rank has a part of each sequence; write it as a "
            "shoal.Metric with sums, or leave cp out of the plan"
        )
    # Tensor-parallel ranks all have the same outputs; so have those of a sequence that was put together again.
    is_first = mesh.coordinate(Axis.TENSOR) == 0 and (
        not scoring.has_whole_sequence or mesh.coordinate(Axis.CONTEXT) == 0
    )
    return MetricSums(metrics, num_samples=count, mesh=mesh, device=objective.device, counts_here=is_first)


def _evaluate_batch(
    objective: Objective, source: Source, ids: np.ndarray, runtime: Runtime | None, measured: MetricSums | None = None
) -> torch.Tensor:
    items = source.collate(ids)
    microbatch = Microbatch.of(items, ids)
    inputs, targets = objective.prepare(microbatch)
    if objective.scoring.step is not None:
        found_loss, _ = objective.call_step(batch_of(microbatch.form, inputs, targets))
        if microbatch.weight == 0:
            return torch.zeros(4, dtype=torch.float64)  # The mean over no item is NaN.
        numbers = [float(found_loss) * microbatch.weight, microbatch.weight, 0.0, 0.0]
        return torch.tensor(numbers, dtype=torch.float64)
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
    if measured is not None:
        measured.add(ids, objective.scoring.whole_scores(output), wanted)
    found = objective.scoring.count_correct(output, wanted)
    correct, counted = found if found is not None else (0, 0)
    # Ranks that gathered the whole sequence each count a part of it.
    part = objective.scoring.factor
    numbers = [float(loss) * weight * part, weight * part, correct * part, counted * part]
    return torch.tensor(numbers, dtype=torch.float64)
