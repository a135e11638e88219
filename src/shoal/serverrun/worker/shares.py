"""The gradient of one share of one step, as a replica of a synchronous plan would compute it; in any order of shares and steps.

A worker of parameter servers does not know which share it will be handed next, so there is no loader with a position here: the
samples of a share are a function of (seed, step, share), and so is its dropout. Whoever computes a share computes the same bits.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.data.growing import growing
from shoal.data.loading.loader import Microbatch, StepBatch
from shoal.data.order import Ids, Position, own_microbatches, permute, position_of, take
from shoal.data.receipt import Counted
from shoal.data.source import Source
from shoal.engine.model import ParallelModel
from shoal.paramserver.config import span_of
from shoal.paramserver.epochs import EpochSpan
from shoal.telemetry.stepclock import StepClock


@dataclass(frozen=True, kw_only=True)
class ShareResult:
    """What the forward and backward passes over a share found; its gradient is in the parameters."""

    loss: float
    """The share's part of the step's mean loss, or the mean over the share itself: as its gradient is."""
    samples: int
    weight: float
    """Items that its mean loss is over."""
    mean_loss: float
    """Over the share's own items."""
    counted: Counted = field(default_factory=Counted)
    """Which samples they are, for the receipt of the epoch."""

    @property
    def rows(self) -> tuple[int, str]:
        """The samples as a push says them."""
        return self.counted.rows, f"{self.counted.total:032x}"

    @classmethod
    def joined(cls, parts: "Sequence[ShareResult]") -> "ShareResult":
        """Of parts of a share, each of which was its own mean."""
        weight = sum(part.weight for part in parts)
        loss = sum(part.mean_loss * part.weight for part in parts) / weight if weight else 0.0
        counted = sum((part.counted for part in parts), Counted())
        samples = sum(part.samples for part in parts)
        return cls(loss=loss, samples=samples, weight=weight, mean_loss=loss, counted=counted)


class ShareRunner:
    """Computes shares of steps on this process's model.

    Args:
        model: laid out by a plan that has one replica.
        source: the training split.
        seed: of the order of samples.
        global_batch: samples of a step.
        num_shares: parts that a step is cut into.
        num_microbatches: forward passes per share.
        of_the_step: True: a gradient is its share of the mean over the whole step, and shares are added. False: it is the mean
            over the share's own items, as one that is an update by itself must be.
        sizes: of the shares beside each other; None: all alike.
        clock: told what it takes to load samples; None: nobody is.
    """

    def __init__(
        self,
        model: ParallelModel,
        source: Source,
        *,
        seed: int,
        global_batch: int,
        num_shares: int,
        num_microbatches: int,
        of_the_step: bool,
        sizes: Sequence[float] | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.model = model
        self._clock = clock or StepClock(None)
        self._source = source
        self._seed = seed
        self._global_batch = global_batch
        self._num_shares = num_shares
        self._num_microbatches = num_microbatches
        self._of_the_step = of_the_step
        self._sizes = sizes
        self._weighed: tuple[bytes, float] | None = None
        """The last step that was weighed: a worker may do many parts of one."""

    def run(
        self, step: int, share: int, *, part: int = 0, num_parts: int = 1, data: EpochSpan | None = None
    ) -> ShareResult:
        """Compute a share, or one of so many even parts of it, and leave its gradient in ``.grad`` of the parameters.

        None there means that no sample touched one. ``data`` is the epoch of the step, where the data grows: a newer version
        only adds samples, so one that reads more than the epoch has its samples too.
        """
        source = growing(self._source) if data is not None else None
        if data is not None and source is not None and data.version > source.version:
            source.grow(data.version)
        ids = self._ids(step, data)
        if self._sizes is None:
            cut = own_microbatches(ids, share * num_parts + part, self._num_shares * num_parts, self._num_microbatches)
        else:
            start, stop = span_of(len(ids), share, self._sizes)
            cut = own_microbatches(ids[start:stop], part, num_parts, self._num_microbatches)
        batch = self._batch(ids, cut, of_the_step=self._of_the_step)
        loss = self.model.forward_backward(batch, step=step)
        assert batch.total_weight is not None
        return ShareResult(
            loss=loss,
            samples=sum(len(microbatch.sample_ids) for microbatch in batch.microbatches),
            weight=batch.local_weight,
            mean_loss=loss * batch.total_weight / batch.local_weight if batch.local_weight else 0.0,
            counted=_count(batch),
        )

    @property
    def num_samples(self) -> int:
        """Of the training split."""
        return len(self._source)

    def end(self) -> None:
        """There is nothing to end: this process is alone."""

    def run_span(self, step: int, start: int, stop: int) -> float:
        """Compute a slice of a step's samples; its part of the step's mean loss. The gradient is left as ``run`` leaves it."""
        ids = self._ids(step)
        batch = self._batch(ids, self._cut_span(ids[start:stop]), of_the_step=True)
        return self.model.forward_backward(batch, step=step)

    def _cut_span(self, own: Ids) -> list[Ids]:
        if self.model.runtime is not None:
            # A schedule has its number of microbatches, whatever the size of the slice.
            return [part for part in np.array_split(own, self._num_microbatches) if len(part)]
        each = max(1, math.ceil(self._global_batch / self._num_shares / self._num_microbatches))
        return [own[first : first + each] for first in range(0, len(own), each)]

    def _ids(self, step: int, data: EpochSpan | None = None) -> Ids:
        num_samples = len(self._source) if data is None else data.samples
        position = position_of(step, num_samples, self._global_batch)
        if data is not None:
            position = Position(epoch=data.epoch, offset=(step - data.first_step) * self._global_batch)
        span, _ = take(position, num_samples, self._global_batch)
        return permute(self._seed, position.epoch, num_samples, np.arange(span.start, span.stop, dtype=np.int64))

    def _batch(self, ids: Ids, cut: Iterable[Ids], *, of_the_step: bool) -> StepBatch:
        """Microbatches of a step whose samples are ``ids``."""
        with self._clock.loading():
            loaded = tuple(Microbatch.of(self._source.collate(own), own) for own in cut)
            local = sum(microbatch.weight for microbatch in loaded)
            total = self._total_weight(ids) if of_the_step else max(1.0, local)
        return StepBatch(
            microbatches=loaded,
            num_samples=len(ids),
            position=position_of(0, len(self._source), self._global_batch),
            total_weight=total,
            local_weight=local,
        )

    def _total_weight(self, ids: Ids) -> float:
        uniform = self._source.uniform_weight
        if uniform is not None:
            return float(uniform * len(ids))
        # Where samples weigh differently the others' must be looked at: no worker knows who has the rest of this step.
        key = ids.tobytes()
        if self._weighed is None or self._weighed[0] != key:
            self._weighed = key, max(1.0, float(self._source.collate(ids).weight))
        return self._weighed[1]


def _count(batch: StepBatch) -> Counted:
    """The samples that are trained on: those of the microbatches, not those that were asked for."""
    return sum((Counted.of(np.asarray(one.sample_ids)) for one in batch.microbatches), Counted())
