"""Predictions for a table of runs: each row's own metric, whether it lies in the range that was calibrated, and an interval.

Every row goes through the same code as ``shoal plan``: a chain of layers, a cluster, a plan, ``cost`` and ``memory``. A formula
holds only as far as it is right beyond the rows that its constants were fitted on, so a prediction says where a run goes beyond
them (``beyond``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial

from shoal.core.plan import Plan
from shoal.costs.layers import LayerKind, ModelCosts, OpKind
from shoal.costs.transformer import TransformerShape, transformer_costs
from shoal.planner.hardware.presets import GIB
from shoal.planner.hardware.software import Covered, Stack, find_stack
from shoal.planner.pricing.closed_form import pipeline_seconds
from shoal.planner.pricing.cost import StepParts, price_parts
from shoal.planner.pricing.job import Job, weight_bytes_of
from shoal.planner.pricing.memory import Memory, kept_bytes, price_memory
from shoal.planner.tables.table import Run, Unread

_STATE_BYTES = 18.0
"""Of a weight in figure 1 of Korthikanti et al. 2022: 2 of the weight, 4 of its gradient, 12 of its optimizer."""
_INSIDE, _OUTSIDE = 1.25, 1.6
"""Factor of the interval around a prediction, in the calibrated range and outside it. Of rows whose group was left out of the fit
19 of 20 lie within 1.24 for every software; of rows whose device was left out within 1.34, and what a row does not say or where
it goes beyond all that was fitted may add to that (tests/unit/planner/tables/test_accuracy.py)."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What was predicted for one row."""

    row: int
    line: int
    """Of the file, counted from 1."""
    source: str
    metric: str
    measured: float | None
    predicted: float | None
    in_range: bool
    why_not: str = ""
    """Why the row is out of range, or has no prediction."""
    odd: str = ""
    """What the row says and was not understood."""
    model: str = ""
    group: tuple[str, ...] = ()
    choice: str = ""
    """How it was run: rows of a group that have this in common are one choice, measured several times."""
    seconds: float | None = None
    """Of a step, whatever the metric: what plans are ranked by."""
    runs_out: bool | None = None
    """Whether the run is expected to run out of memory, whatever the metric."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between which values the truth is expected."""
        if self.predicted is None:
            return None
        factor = _INSIDE if self.in_range else _OUTSIDE
        return self.predicted / factor, self.predicted * factor

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "row": self.row,
            "line": self.line,
            "source": self.source,
            "metric": self.metric,
            "measured": self.measured,
            "predicted": self.predicted,
            "in_range": self.in_range,
            "interval": self.interval,
            "note": self.why_not if self.predicted is not None else f"line {self.line}: {self.why_not}",
        }


@cache
def _chain(shape: TransformerShape) -> ModelCosts:
    return transformer_costs(shape)


def job_of(run: Run, stack: Stack | None = None) -> Job:
    """A row as a job."""
    found = stack or find_stack(run.software, run.device)
    return Job(
        chain=_chain(run.shape),
        cluster=run.cluster,
        stack=found,
        global_batch=run.global_batch,
        precision=run.precision,
        weight_bytes=weight_bytes_of(found.software, run.precision),
    )


def predict_run(run: Run | Unread, stack: Stack | None = None) -> Predicted:
    """The prediction of a row's own metric.

    Args:
        run: a row.
        stack: constants to use in place of the stored ones; for fitting.
    """
    predicted_row = partial(
        Predicted, row=run.row, line=run.line, source=run.source, metric=run.metric, measured=run.measured
    )
    if isinstance(run, Unread):
        return predicted_row(predicted=None, in_range=False, why_not=run.reason)
    metric = _METRICS.get(run.metric)
    if metric is None:
        reason = f"measured_metric is {run.metric!r}, an unknown metric; known are {', '.join(_METRICS)}"
        return predicted_row(predicted=None, in_range=False, why_not=reason)
    job, plan, reasons = job_of(run, stack), run.plan, list(run.assumed)
    if not job.stack.is_fitted:
        reasons.append(f"no run of {job.stack.software.name} on {run.device} was there to calibrate on")
    else:
        reasons += beyond(run, job.stack.covered)
    seconds = tuned_seconds(job, plan) if run.recompute == "unknown" else step_seconds(job, plan)
    return predicted_row(
        predicted=metric(run, job, plan, seconds),
        in_range=not reasons,
        why_not="; ".join(reasons),
        odd="; ".join(run.odd),
        model=run.model,
        group=run.group,
        choice=f"{plan} {run.recompute} {run.precision} {run.micro_batch:g}",
        seconds=seconds,
        runs_out=None if run.metric in _COMPUTED else _runs_out(run, job, plan),
    )


def step_seconds(job: Job, plan: Plan, parts: StepParts | None = None) -> float:
    """Seconds of a step, by the schedule's closed form."""
    parts = parts or price_parts(job, plan)
    return pipeline_seconds(parts, plan) + parts.after_pipeline


def fullest(job: Job, plan: Plan) -> Memory:
    """The memory of the rank that has most."""
    return max(price_memory(job, plan), key=lambda memory: memory.allocated)


def fits(job: Job, plan: Plan) -> bool:
    """Whether every rank fits; an allocator gives back what it reserved before it gives up."""
    return fullest(job, plan).allocated <= job.cluster.device.free_bytes


def held_memory(run: Run, job: Job, plan: Plan) -> Memory:
    """The memory of the fullest rank of a row's run: with as much recompute as it needed, where the row does not say."""
    if run.recompute != "unknown":
        return fullest(job, plan)
    share = needed_recompute(job, plan)
    least, most = (fullest(job, replace(plan, recompute=recompute)) for recompute in ("none", "full"))
    if share in (0.0, 1.0):
        return most if share else least
    parts = {
        field.name: (1 - share) * getattr(least, field.name) + share * getattr(most, field.name)
        for field in fields(Memory)
    }
    return Memory(**parts)


def needed_recompute(job: Job, plan: Plan) -> float:
    """Share of the blocks that must be recomputed for a plan to fit: what somebody who tuned a run will have chosen."""
    limit = job.cluster.device.free_bytes
    without = fullest(job, replace(plan, recompute="none")).allocated
    if without <= limit:
        return 0.0
    least = fullest(job, replace(plan, recompute="full")).allocated
    return 1.0 if least >= limit else (without - limit) / (without - least)


def tuned_seconds(job: Job, plan: Plan) -> float:
    """Seconds of a step with as much recompute as memory asks for, and no more."""
    return mixed_seconds(job, plan, needed_recompute(job, plan))


def mixed_seconds(job: Job, plan: Plan, share: float) -> float:
    """Seconds of a step in which a share of the blocks is recomputed."""
    least, most = (
        step_seconds(job, replace(plan, recompute=recompute)) if part else 0.0
        for recompute, part in (("none", 1 - share), ("full", share))
    )
    return (1 - share) * least + share * most


def model_flops(chain: ModelCosts) -> float:
    """Of one sample, forward and backward, as papers count them: without what is recomputed, causal or not."""
    return 3.0 * chain.forward_flops


def _tflops(run: Run, job: Job, plan: Plan, seconds: float, *, with_recompute: bool) -> float:
    shape = run.shape
    # Narayanan et al. 2021, eq. 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h), of which a quarter is recomputed.
    size = shape.sequence * shape.layers * shape.hidden**2
    flops = (96.0 if with_recompute and plan.recompute == "full" else 72.0) * run.global_batch * size
    flops *= 1 + shape.sequence / (6 * shape.hidden) + shape.vocab / (16 * shape.layers * shape.hidden)
    if shape.is_gated or shape.experts > 1:
        again = 4 / 3 if with_recompute and plan.recompute == "full" else 1.0
        flops = model_flops(job.chain) * run.global_batch * again
    return flops / (seconds * run.num_devices * 1e12)


def _matrix_bytes(run: Run, job: Job, plan: Plan, seconds: float) -> float:
    """Weights of the blocks' products with their state, as figure 1 of Korthikanti et al. 2022 counts them."""
    block = next(layer for layer in job.chain.layers if layer.kind is LayerKind.BLOCK)
    matrices = sum(op.inner * op.outer * op.count for op in block.ops if op.kind is OpKind.MATMUL)
    return matrices * run.shape.layers / (plan.tp * plan.pp) * _STATE_BYTES / GIB


def _first_stage_bytes(run: Run, job: Job, plan: Plan, seconds: float) -> float:
    """Activations of the first stage's blocks: L / p layers of p microbatches; 1 + (p - 1) / (p v) if interleaved (ibid.)."""
    block = next(layer for layer in job.chain.layers if layer.kind is LayerKind.BLOCK)
    each = kept_bytes(block, tensor=plan.tp, sequence_parallel=plan.sp, context=plan.cp, recompute=plan.recompute)
    held = float(run.shape.layers)
    if plan.chunks:
        held *= 1 + (plan.pp - 1) / (plan.pp * plan.chunks)
    return each * run.micro_batch * held / GIB


def _runs_out(run: Run, job: Job, plan: Plan) -> bool:
    return not fits(job, replace(plan, recompute="full") if run.recompute == "unknown" else plan)


def _is_out_of_memory(run: Run, job: Job, plan: Plan, seconds: float) -> float:
    return float(_runs_out(run, job, plan))


def _tokens(run: Run, job: Job, plan: Plan, seconds: float) -> float:
    return run.global_batch * job.chain.tokens / seconds


def _reserved(run: Run, job: Job, plan: Plan, seconds: float) -> float:
    memory = held_memory(run, job, plan)
    return (memory.allocated + memory.reserve) / GIB


def _utilisation(run: Run, job: Job, plan: Plan, seconds: float) -> float:
    """As a share: what a metric is counted in is said by its name, never by what was measured."""
    return _tflops(run, job, plan, seconds, with_recompute=False) * 1e12 / job.cluster.device.flops(job.precision)


Metric = Callable[[Run, Job, Plan, float], float]
_METRICS: Mapping[str, Metric] = {
    "iter_time_s": lambda run, job, plan, seconds: seconds,
    "iter_time_ms": lambda run, job, plan, seconds: seconds * 1e3,
    "samples_per_s": lambda run, job, plan, seconds: run.global_batch / seconds,
    "samples_per_s_per_gpu": lambda run, job, plan, seconds: run.global_batch / seconds / run.num_devices,
    "tokens_per_s_per_gpu": lambda run, job, plan, seconds: _tokens(run, job, plan, seconds) / run.num_devices,
    "tokens_per_s": _tokens,
    "tflops_per_gpu_hw": partial(_tflops, with_recompute=True),
    "tflops_per_gpu_model": partial(_tflops, with_recompute=False),
    "tflops_per_gpu": partial(_tflops, with_recompute=False),
    "mfu": _utilisation,
    "mfu_percent": lambda run, job, plan, seconds: 100 * _utilisation(run, job, plan, seconds),
    "peak_mem_gib": lambda run, job, plan, seconds: held_memory(run, job, plan).allocated / GIB,
    "peak_reserved_gib": _reserved,
    "mem_gb_nvidia_smi_max": lambda run, job, plan, seconds: held_memory(run, job, plan).device / GIB,
    "activation_mem_gib": _first_stage_bytes,
    "param_opt_mem_gib": _matrix_bytes,
    "oom": _is_out_of_memory,
}
_COMPUTED = ("activation_mem_gib", "param_opt_mem_gib")
"""Metrics of figures that nobody measured: no run says whether it fitted."""
TIMED = frozenset(metric for metric in _METRICS if "mem" not in metric and metric not in ("oom", "peak_reserved_gib"))
"""Metrics that say how long a step takes."""


def timed_value(run: Run, job: Job, seconds: float) -> float:
    """What a row's own metric is for a step of so many seconds; for rows of ``TIMED``."""
    return _METRICS[run.metric](run, job, run.plan, seconds)


def is_better_low(metric: str) -> bool:
    """True where less of it is faster."""
    return metric in ("iter_time_s", "iter_time_ms")


_DEGREES = ("tp", "pp", "cp", "ep")


def numbers_of(run: Run) -> dict[str, float]:
    """What of a run is compared: devices, tokens of a sample, width, degrees."""
    degrees = {axis: float(getattr(run.plan, axis)) for axis in _DEGREES}
    return {
        "devices": float(run.num_devices),
        "sequence": float(run.shape.sequence),
        "hidden": float(run.shape.hidden),
        **degrees,
    }


def cover(runs: Sequence[Run]) -> dict[str, object]:
    """The least and the most of each number that some runs have, and the types that they compute in."""
    numbers = [numbers_of(run) for run in runs]
    ends = {name: [min(each[name] for each in numbers), max(each[name] for each in numbers)] for name in numbers[0]}
    return {"numbers": ends, "precisions": sorted({run.precision for run in runs})}


def beyond(run: Run, covered: Covered | None) -> list[str]:
    """In what a run lies outside what was fitted on, in words; nothing where that is not known."""
    if covered is None:
        return []
    found = [
        f"{name} {value:g} is outside the {low:g} to {high:g} that were calibrated on"
        for name, value in numbers_of(run).items()
        for low, high in (covered.numbers.get(name, (value, value)),)
        if not low <= value <= high
    ]
    if run.precision not in covered.precisions:
        found.append(f"{run.precision} was not calibrated on, but {', '.join(covered.precisions)}")
    return found
