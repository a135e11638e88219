"""What a rank's step should move, from the plain model and the batches that the rank is given."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shoal.comm.global_batch import AXIS
from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.axes import Axis
from shoal.core.compressrule import CompressRule
from shoal.data.loading.loader import Microbatch, StepBatch
from shoal.data.source import Splits
from shoal.engine.forecast import step_shape
from shoal.engine.hooks import Hook
from shoal.engine.objective import is_known, kind_of
from shoal.engine.parallelize import example_of
from shoal.engine.resolve import updates_per_step
from shoal.models.losses import Loss
from shoal.parallel.tensor.traffic_forecast import CrossingRecord, record_crossings
from shoal.parallel.tensor.vocabulary import rows_per_rank
from shoal.parallel.traffic_forecast import MicrobatchShape, StepShape, forecast_step_traffic
from shoal.pipeline.build import Pipeline
from shoal.pipeline.reduction import StageReduction
from shoal.pipeline.traffic import Boundaries, expected_exchange, expected_sends, trace_boundaries
from shoal.trainer.loop import Trainer

_FLOAT64 = 8


class TrafficObserver(Hook):
    """Notes the batches of a trainer and works out what each step should have cost."""

    def __init__(self, trainer: Trainer, plain: nn.Module, loss: Loss, data: Splits) -> None:
        self._trainer = trainer
        self._batch: StepBatch | None = None
        self._number = 0
        self._is_known = is_known(loss)
        self._record: CrossingRecord | None = None
        if trainer.mesh.has(Axis.TENSOR):
            self._record = record_crossings(plain, trainer.engine.analysis, example_of(data))
        self._plain = plain
        self._boundaries: dict[Any, Boundaries] = {}
        trainer.engine.add_hook(self)

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """Note the step's batch, and forget the last step's attentions."""
        self._batch, self._number = batch, step
        if self._trainer.engine.layout.context is not None:
            self._trainer.engine.layout.context.seen.forget()

    def expected(self, counted: TrafficCounts) -> TrafficCounts:
        """The counts that the step should have."""
        trainer, batch = self._trainer, self._batch
        assert batch is not None
        if trainer.engine.asynchronous is not None:
            context = trainer.engine.layout.context
            attended = context.forecast_traffic(recomputes=trainer.plan.recompute != "none") if context else {}
            return add_traffic(attended, self._pipeline(batch, counted), self._updates(counted))
        reduction = trainer.engine.reduction
        if isinstance(reduction, StageReduction) and reduction.sharded is not None:
            reduction = reduction.sharded
        found = forecast_step_traffic(
            plan=trainer.plan,
            mesh=trainer.mesh,
            layout=trainer.engine.layout,
            reduction=reduction,
            microbatches=[
                self._shape(index, own) for index, own in enumerate(trainer.engine.passes.filler.fill(batch))
            ],
            step=self._step_shape(batch),
            counted=counted,
        )
        if trainer.plan.pp > 1 and trainer.plan.zero == 3 and (key := (Axis.DATA.value, "all_gather")) in counted:
            # Which units are still there when they are needed again depends on the schedule; only that is taken from the count.
            found[key] = counted[key]
        # What a loss gathers of the global batch is the user's to say, and no plan's.
        gathered = {key: traffic for key, traffic in counted.items() if key[0] == AXIS}
        adapted = {} if trainer.adapt is None else trainer.adapt.forecast_traffic(self._step_shape(batch).num_rows)
        return add_traffic(found, self._pipeline(batch, counted), gathered, self._islands(), adapted)

    def _islands(self) -> TrafficCounts:
        """What goes to other islands; nothing where the run is one."""
        islands = self._trainer.engine.islands
        if islands is None:
            return {}
        # Where it is by the rate or the loss, the rule of the plan says nothing of it.
        is_round = islands.rule.is_round(self._number) if islands.interval.is_fixed else islands.was_round
        return islands.forecast_traffic(self._number, is_round=is_round)

    @property
    def _scales_by_frozen_ratios(self) -> bool:
        """1-bit LAMB measures no trust ratios once the warm-up and the step that freezes them are over."""
        rule = None if self._trainer.plan.compress is None else CompressRule.parse(self._trainer.plan.compress)
        return rule is not None and rule.kind == "onebit" and self._number > rule.start

    def _step_shape(self, batch: StepBatch) -> StepShape:
        norms = 0 if self._scales_by_frozen_ratios else None
        return step_shape(self._trainer.engine, counts_weight=batch.total_weight is None, num_trust_norms=norms)

    def _pipeline(self, batch: StepBatch, counted: TrafficCounts) -> TrafficCounts:
        """What goes from stage to stage; nothing without a pipeline."""
        cut, trainer = self._trainer.engine.pipeline, self._trainer
        if cut is None:
            return {}
        boundaries = [self._boundary(cut, microbatch) for microbatch in trainer.engine.passes.filler.fill(batch)]
        runtime = trainer.engine.runtime
        schedule = cut.schedule if runtime is None else runtime.schedule
        sent = expected_sends(schedule, cut.rank, boundaries)
        key = (Axis.PIPELINE.value, "send")
        shared = expected_exchange(cut.trained, cut.holders, grid=cut.schedule.grid, rank=cut.rank)
        if (trainer.plan.sp or trainer.plan.cp > 1) and key in sent and key in counted:
            # The plain model's sequence is whole; how much of it a rank has at a boundary is its own affair.
            sent[key] = replace(sent[key], num_bytes=counted[key].num_bytes)
        flag_bytes = (
            trainer.engine.reduction.num_flag_bytes if isinstance(trainer.engine.reduction, StageReduction) else 0
        )
        # In the last bucket of gradients: no message of their own.
        flags = (
            {(trainer.mesh.replicas.axis, "all_reduce"): Traffic(calls=0, num_bytes=flag_bytes)} if flag_bytes else {}
        )
        return add_traffic(sent, shared, flags)

    def _boundary(self, cut: Pipeline, microbatch: Microbatch) -> Boundaries:
        kind = kind_of(microbatch)
        if kind not in self._boundaries:
            inputs, _ = self._trainer.engine.objective.prepare(microbatch)
            plain = self._plain.to(device=self._trainer.world.device, dtype=self._trainer.engine.precision.weight_dtype)
            with self._trainer.engine.precision.autocast(self._trainer.world.device.type):
                self._boundaries[kind] = trace_boundaries(plain, cut.stages, cut.chain.messages, inputs)
        return self._boundaries[kind]

    def _updates(self, counted: TrafficCounts) -> TrafficCounts:
        """Sums of an asynchronous step: gradients of every update, weights of the microbatches, losses and norms."""
        trainer = self._trainer
        mesh, updates = trainer.mesh, updates_per_step(trainer.plan)
        found: TrafficCounts = {("everyone", "all_reduce"): Traffic(calls=1, num_bytes=4 * _FLOAT64)}
        if mesh.replicas.size > 1:
            own = sum(value.nbytes for value in trainer.engine.reduction.updated.values())
            calls = max(1, counted.get((mesh.replicas.axis, "all_reduce"), Traffic()).calls)
            sums: TrafficCounts = {(mesh.replicas.axis, "all_reduce"): Traffic(calls=calls, num_bytes=updates * own)}
            found = add_traffic(found, sums)
        if mesh.has(Axis.DATA):
            weights = Traffic(calls=1, num_bytes=_FLOAT64 * (trainer.plan.microbatches or 1))
            found = add_traffic(found, {(Axis.DATA.value, "all_reduce"): weights})
        return found

    def _shape(self, index: int, microbatch: Microbatch) -> MicrobatchShape:
        tensor = self._trainer.engine.layout.tensor
        targets, weight = self._trainer.engine.objective.scoring.own_part(microbatch.targets, microbatch.weight)
        record, has_end = self._record_of(index)
        shape = MicrobatchShape(samples=len(microbatch.sample_ids), targets=None, record=record)
        if tensor is None or not tensor.splits_logits or weight == 0 or not has_end:
            return shape
        assert isinstance(targets, Tensor), "scores are only split where one tensor of targets is compared with them"
        if self._is_known:
            return replace(shape, targets=targets.numel())
        assert tensor.vocab is not None
        degree = self._trainer.mesh.degree(Axis.TENSOR)
        compute = self._trainer.engine.precision.compute_dtype or self._trainer.engine.precision.weight_dtype
        scores = targets.numel() * rows_per_rank(tensor.vocab, degree) * degree * compute.itemsize
        return replace(shape, gathered_scores=scores)

    def _record_of(self, microbatch: int) -> tuple[CrossingRecord | None, bool]:
        """What crosses of a microbatch on this rank, and whether it has the last stage of it."""
        cut = self._trainer.engine.pipeline
        if cut is None:
            return self._record, True
        grid = cut.schedule.grid
        own = [stage for stage in range(grid.num_stages) if grid.rank_of(stage, microbatch) == cut.rank]
        paths = {unit.path for unit in cut.stages.units if not cut.chain.stages_of(unit.path).isdisjoint(own)}
        record = self._record.within(paths) if self._record is not None else None
        return record, grid.num_stages - 1 in own
