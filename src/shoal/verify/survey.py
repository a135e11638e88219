"""What a rank's step should move, from the plain model and the batches that the rank is given."""

from typing import Any

from torch import nn

from shoal.comm.ledger import Account
from shoal.core.axes import Axis
from shoal.data.loader import Microbatch, StepBatch
from shoal.data.splits import Splits
from shoal.models.build import Loss
from shoal.parallel.tensor.traffic import Survey, survey_crossings
from shoal.parallel.tensor.vocabulary import rows_per_rank
from shoal.parallel.traffic import MicrobatchShape, StepShape, count_trust_norms, expected_step_traffic
from shoal.trainer.loop import Trainer
from shoal.trainer.scoring import is_known


class TrafficSurvey:
    """Notes the batches of a trainer and works out what each step should have cost."""

    def __init__(self, trainer: Trainer, plain: nn.Module, loss: Loss, data: Splits) -> None:
        self._trainer = trainer
        self._batch: StepBatch | None = None
        self._is_known = is_known(loss)
        self._survey: Survey | None = None
        if trainer.mesh.has(Axis.TENSOR):
            example = data.train.collate(range(min(2, len(data.train)))).inputs
            self._survey = survey_crossings(plain, trainer.placed.anatomy, example)
        self._run = trainer.runner.run
        trainer.runner.__dict__["run"] = self._note

    def _note(self, batch: StepBatch, **options: Any) -> Any:
        self._batch = batch
        return self._run(batch, **options)

    def begin_step(self) -> None:
        """Forget the last step's attentions."""
        if self._trainer.placed.laid.context is not None:
            self._trainer.placed.laid.context.seen.forget()

    def expected(self, counted: Account) -> Account:
        """The account that the step should have."""
        trainer, batch = self._trainer, self._batch
        assert batch is not None
        runner, precision = trainer.runner, trainer.precision
        compute = precision.compute_dtype or precision.weight_dtype
        return expected_step_traffic(
            plan=trainer.plan,
            mesh=trainer.mesh,
            laid=trainer.placed.laid,
            reduction=trainer.reduction,
            survey=self._survey,
            microbatches=[self._shape(microbatch) for microbatch in runner._padded(batch)],
            step=StepShape(
                has_passengers=runner.passengers is not None,
                exact_norm=trainer.optim_config.clip is not None,
                counts_weight=batch.total_weight is None,
                num_trust_norms=count_trust_norms(trainer.optimizer, trainer.optimizer.param_groups),
                weight_bytes=precision.weight_dtype.itemsize,
                compute_bytes=compute.itemsize,
            ),
            counted=counted,
        )

    def _shape(self, microbatch: Microbatch) -> MicrobatchShape:
        tensor = self._trainer.placed.laid.tensor
        targets, weight = self._trainer.objective.scoring.own_part(microbatch.targets, microbatch.weight)
        samples = len(microbatch.sample_ids)
        if tensor is None or not tensor.splits_logits or weight == 0:
            return MicrobatchShape(samples=samples, targets=None)
        if self._is_known:
            return MicrobatchShape(samples=samples, targets=targets.numel())
        assert tensor.vocab is not None
        degree = self._trainer.mesh.degree(Axis.TENSOR)
        compute = self._trainer.precision.compute_dtype or self._trainer.precision.weight_dtype
        scores = targets.numel() * rows_per_rank(tensor.vocab, degree) * degree * compute.itemsize
        return MicrobatchShape(samples=samples, targets=None, gathered_scores=scores)
