"""What a run should cost, as far as that is known when it begins and takes no work to find out.

A run whose plan was rehearsed has a forecast of everything (``forecast.json``). Of any other the layout itself says what a rank
will hold, a schedule how long stages of equal length would wait for each other, and, where nothing depends on what the model
does in its passes, what one step moves. The rest is left open: ``shoal verify`` and ``--dry-run`` find it out, and take their
time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.rundir import RunDir
from shoal.data.source import Source
from shoal.engine.model import ParallelModel
from shoal.engine.piggyback import NUM_SCALARS
from shoal.engine.sizes import measure_state
from shoal.parallel.traffic_forecast import MicrobatchShape, StepShape, count_trust_norms, forecast_step_traffic
from shoal.parallel.zero.apply import ZeroReduction
from shoal.pipeline.reduction import StageReduction
from shoal.schedules.pricing import price
from shoal.telemetry.measurements import Forecast, read_rehearsal

_MOST_CELLS = 20_000
"""Of a schedule that is priced at the start: more would take a second."""


def forecast_run(engine: ParallelModel, source: Source, run_dir: Path | None) -> Forecast | None:
    """What is known on this rank; of a rehearsed run the first one says all, and the others nothing."""
    world = engine.world
    kept = None if run_dir is None else _rehearsed(RunDir(run_dir).forecast)
    if kept is not None:
        return kept if world.is_first else None
    rank = str(world.rank)
    moved = _traffic(engine, source)
    return Forecast(
        source="layout",
        bubble=_bubble(engine) if world.is_first else None,
        memory_bytes={rank: _state(engine)},
        traffic=None if moved is None else {rank: moved},
    )


def step_shape(engine: ParallelModel, *, counts_weight: bool, num_trust_norms: int | None = None) -> StepShape:
    """What the small sums of a step depend on.

    Args:
        engine: the model as it is laid out.
        counts_weight: samples weigh differently, so replicas add up their weights.
        num_trust_norms: norms of whole tensors that the optimizer asks for; left out, those of every group.
    """
    layout, precision = engine.layout, engine.precision
    trained = {
        entry.parameter: entry.shape for entry in engine.outline.values() if entry.parameter and entry.is_trained
    }
    whole = [layout.placements[name].whole_shape if name in layout.placements else trained[name] for name in trained]
    norms = count_trust_norms(engine.optimizer, engine.optimizer.param_groups)
    return StepShape(
        has_piggyback=engine.scalars.carrier is not None,
        exact_norm=engine.max_norm is not None or engine.needs_exact_norm,
        counts_weight=counts_weight,
        num_trust_norms=norms if num_trust_norms is None else num_trust_norms,
        weight_bytes=precision.weight_dtype.itemsize,
        compute_bytes=(precision.compute_dtype or precision.weight_dtype).itemsize,
        num_rows=sum(shape[0] if shape else 1 for shape in whole),
    )


def _rehearsed(path: Path) -> Forecast | None:
    """What the tuning wrote down; None where there is nothing, or nothing that can be read."""
    try:
        return read_rehearsal(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None  # Nothing depends on it.


def _bubble(engine: ParallelModel) -> float | None:
    if engine.pipeline is None:
        return None
    schedule = engine.pipeline.schedule
    num_cells = sum(1 for rank in range(schedule.grid.num_ranks) for _ in schedule.actions(rank))
    return price(schedule).bubble if num_cells <= _MOST_CELLS else None


def _state(engine: ParallelModel) -> dict[str, int]:
    """What this rank holds from step to step. Optimizer state is there before the first step, gradients are not."""
    reduction = engine.reduction
    if isinstance(reduction, StageReduction) and reduction.sharded is not None:
        reduction = reduction.sharded
    held = measure_state(engine)
    if isinstance(reduction, ZeroReduction):
        layout, item = reduction.layout, reduction.weights.element_size()
        keeps_whole = reduction.stage == 1 or engine.pipeline is not None or (engine.plan.microbatches or 1) > 1
        held["gradients"] = (layout.size if keeps_whole else layout.shard_size(reduction.rank)) * item
    else:
        held["gradients"] = sum(parameter.nbytes for parameter in reduction.updated.values())
    if engine.scalars.carrier is not None:
        held["gradients"] += NUM_SCALARS * engine.precision.weight_dtype.itemsize
    return held


def _traffic(engine: ParallelModel, source: Source) -> dict[str, Sequence[Any]] | None:
    """Calls and bytes of one step; None where passes move something too, or some steps more than others."""
    plan, mesh = engine.plan, engine.mesh
    is_plain = plan.tp == plan.cp == plan.pp == plan.islands == 1
    is_held = not (mesh.has_absent or mesh.follows_present)
    # Batch norm exchanges statistics, hooks do what they like, and a loss over the global batch gathers it.
    has_more = engine.passes.has_batch_norm or plan.compress is not None or bool(engine.hooks.named())
    if not is_plain or not is_held or has_more:
        return None
    found = forecast_step_traffic(
        plan=plan,
        mesh=mesh,
        layout=engine.layout,
        reduction=engine.reduction,
        microbatches=[MicrobatchShape(samples=1, targets=None)] * (plan.microbatches or 1),
        step=step_shape(engine, counts_weight=source.uniform_weight is None),
        counted={},
    )
    # Into how many buckets gradients are cut is found out in the first steps.
    is_cut = plan.zero == 0
    return {
        f"{axis} {operation}": [None if is_cut and axis == mesh.replicas.axis else moved.calls, moved.num_bytes]
        for (axis, operation), moved in sorted(found.items())
    }
