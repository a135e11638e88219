"""Counts what this rank trains on, and brings the ranks together where an epoch ends: see ``data/receipt.py``.

Ranks count together *before* the step that ends an epoch, and it counts only after the step: between the update of the weights
and the count of steps nothing may wait for another rank, or its death would leave no step that is whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.core.events import EpochReceipt, Event, ReaderSlow
from shoal.data.chosen import Chosen
from shoal.data.loading.loader import StepBatch
from shoal.data.loading.parts import build_order, options_of
from shoal.data.loading.slowness import SlowReader, find_slow_reader
from shoal.data.options import LoaderOptions
from shoal.data.order import Position
from shoal.data.receipt import (
    Counted,
    RankCount,
    ReceiptState,
    add_replicas,
    hash_range,
    refuse_difference,
    share_of_range,
    taken_up,
)
from shoal.data.sampling.replay import Replayed
from shoal.data.sampling.samplers import Sampled, Sampling, Weighted
from shoal.data.source import Source, Streamed

_FOLD_AT = 4096
"""Ids that are kept before they are hashed: a few ids cost numpy as much as thousands."""
_STEPS_OF_LOADING = 5
"""Fewer say nothing of how quick a rank reads."""
_REPLAYED_AT_ONCE = 1 << 16
_WORD = (1 << 31) - 1
_NUM_WORDS = 5


def why_no_receipt(source: Source, options: LoaderOptions | None = None) -> str:
    """Why epochs of a source are not every sample once; empty where they are."""
    options = options or options_of(source)
    if isinstance(source, Streamed):
        return "a stream has the samples that it yields, and nobody knows them beforehand"
    if len(source) == 0:
        return "there is no sample"
    if options.max_tokens is not None and options.batch_sampler is not None:
        return ""
    sampling = build_order(source, global_batch=1, seed=0, options=replace(options, max_tokens=None)).sampling
    if isinstance(sampling, Weighted):
        return "samples are drawn with weights, so that an epoch has some of them often and others never"
    if isinstance(sampling, Sampled):
        return "a sampler of the user's own says which samples an epoch has"
    return ""


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    """What becomes of the receipt when the step that was announced is taken."""

    state: ReceiptState
    event: EpochReceipt | None = None
    failure: RunError | None = None


class ReceiptCounter:
    """The receipt of a run on this rank.

    Args:
        source: of the samples.
        world: the ranks.
        replica: whose samples this rank computes, with the ranks that have the same number.
        seed: of the order.
        options: of the loader; the source's own when left out.
        each_step: says whether ranks count together at every step, because any of them may be lost with what it has counted.
        report: told of the event at the end of an epoch, on the first rank.
    """

    def __init__(
        self,
        source: Source,
        *,
        world: World,
        replica: int,
        seed: int,
        options: LoaderOptions | None = None,
        each_step: Callable[[], bool] = lambda: False,
        report: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._source, self._world, self._replica, self._seed = source, world, replica, seed
        self._options = options or options_of(source)
        self._each_step = each_step
        self.report = report
        self._why = why_no_receipt(source, self._options)
        self._samples = 0 if self._why else len(source)
        self._order = "" if self._why else self._describe()
        self.state = taken_up(None, epoch=0, offset=0, order=self._order)
        """What all ranks know together: of a checkpoint, or of the last step at which they counted together."""
        self._own = Counted()
        self._pending: list[NDArray[np.int64]] = []
        self._num_pending = 0
        self._offset = 0
        self._load_seconds, self._num_steps = 0.0, 0
        self._ahead: _Ahead | None = None
        self._expected: Counted | None = None

    def _describe(self) -> str:
        chosen = self._options
        kind = "as they lie" if chosen.shuffle is False else chosen.order
        window = "" if chosen.window is None else f" of {chosen.window} blocks"
        past = f"the last {chosen.replay_last or 'all'}"
        if chosen.replay_from is not None:
            past = Chosen(chosen.replay_from).describe()
        replay = f", replay {chosen.replay:g} of {past}" if chosen.replay else ""
        return f"{self._samples} samples, seed {self._seed}, order {kind}{window}{replay}"

    def take_up(self, state: ReceiptState | None, position: Position) -> str | None:
        """Go on at a position; what to tell the user of it, if anything."""
        if not self._why and len(self._source) != self._samples:
            self._samples, self._expected = len(self._source), None
            self._order = self._describe()
        self.state = taken_up(state, epoch=position.epoch, offset=position.offset, order=self._order)
        self._own, self._pending, self._num_pending, self._ahead = Counted(), [], 0, None
        self._offset = position.offset
        if self._why or not self.state.reason:
            return None
        return f"epoch {position.epoch} will have no receipt: {self.state.reason}"

    def give_up(self, reason: str) -> None:
        """This epoch cannot be proved any more. All ranks do it together."""
        if not self._why and not self.state.reason:
            self.state = replace(self.state, reason=reason)

    def before_step(self, batch: StepBatch) -> None:
        """Announce the batch of the next step. All ranks call it together; they count together where an epoch ends with it."""
        if self._why:
            return
        is_end = batch.position.epoch != batch.epoch
        if not is_end and not self._each_step():
            return
        agreed = self._count_together(Counted.of(_ids_of(batch)))
        self._ahead = self._settle(agreed, batch) if is_end else _Ahead(state=agreed)

    def after_step(self, batch: StepBatch) -> ReceiptState | None:
        """The step was taken, or left out for good; returns what all ranks know together, None where there is no receipt.

        Raises:
            RunError: the epoch that it ended was not every sample once. All ranks raise together.
        """
        is_end = batch.position.epoch != batch.epoch
        self._load_seconds, self._num_steps = self._load_seconds + batch.load_seconds, self._num_steps + 1
        if self._why:
            if is_end and self._world.is_first:
                self.report(EpochReceipt(epoch=batch.epoch, rows=0, ok=None, reason=self._why))
            return None
        self._offset = 0 if is_end else batch.position.offset
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ids = _ids_of(batch)
            self._pending.append(ids)
            self._num_pending += len(ids)
            if self._num_pending >= _FOLD_AT:
                self._fold()
            return self.state
        self.state, self._own, self._pending, self._num_pending = ahead.state, Counted(), [], 0
        if ahead.event is not None and self._world.is_first:
            self.report(ahead.event)
        if ahead.failure is not None:
            raise ahead.failure
        return self.state

    def agree(self) -> ReceiptState | None:
        """What all ranks have trained on in this epoch, for a checkpoint. All ranks call it together."""
        if self._why:
            return None
        self.state = self._count_together(Counted())
        self._own, self._pending, self._num_pending = Counted(), [], 0
        return self.state

    def _fold(self) -> None:
        if self._pending:
            self._own += Counted.of(np.concatenate(self._pending))
            self._pending, self._num_pending = [], 0

    def _count_together(self, more: Counted) -> ReceiptState:
        """The state with what all ranks have counted since the last time, and ``more`` on this one."""
        self._fold()
        mine = self._own + more
        own = _as_tensor([self._replica, mine.rows, round(self._load_seconds * 1e6)], mine.total)
        parts, seconds = [], []
        for rank, one in enumerate(self._world.all_gather(own.to(self._world.device))):
            (replica, rows, micros), total = _from_tensor(one, 3)
            parts.append(RankCount(rank=rank, replica=replica, counted=Counted(rows=rows, total=total)))
            seconds.append(micros / 1e6)
        if self._num_steps >= _STEPS_OF_LOADING:
            self._tell_slow(find_slow_reader(seconds, self._num_steps))
        return self.state.plus(add_replicas(parts))

    def _tell_slow(self, slow: SlowReader | None) -> None:
        if slow is not None and self._world.is_first:
            source = str(getattr(self._source, "address", type(self._source).__name__))
            steps, seconds, usual = self._num_steps, slow.seconds, slow.usual
            self.report(
                ReaderSlow(slow_rank=slow.rank, load_seconds=seconds, usual_seconds=usual, steps=steps, source=source)
            )
        self._load_seconds, self._num_steps = 0.0, 0

    def _settle(self, agreed: ReceiptState, batch: StepBatch) -> _Ahead:
        """The end of an epoch."""
        event = EpochReceipt(
            epoch=agreed.epoch, rows=agreed.rows, ok=None, sum=f"{agreed.total:032x}", reason=agreed.reason
        )
        if agreed.reason:
            return _Ahead(state=agreed.next_epoch(is_proved=False), event=event)
        replayed = self._replayed(agreed.epoch)
        expected = self._whole() + replayed - self._left_out(agreed.epoch, self._offset + batch.num_samples)
        found = agreed.counted == expected
        failure = None
        try:
            refuse_difference(agreed.epoch, agreed.counted, expected)
        except RunError as error:
            failure = error
        total = f"{expected.total:032x}"
        event = replace(event, ok=found, expected_rows=expected.rows, expected=total, replayed=replayed.rows)
        return _Ahead(state=agreed.next_epoch(is_proved=found), event=event, failure=failure)

    def _whole(self) -> Counted:
        """Every sample of the data once: as the source knows it, or found by all ranks together, each its share, and kept."""
        if self._expected is None:
            total = getattr(self._source, "row_hashes", None)
            if total is None:
                own = hash_range(share_of_range(self._samples, self._world.rank, self._world.size))
                told = self._world.all_gather(_as_tensor([], own).to(self._world.device))
                total = sum(_from_tensor(one, 0)[1] for one in told) % (1 << 128)
            self._expected = Counted(rows=self._samples, total=int(total))
        return self._expected

    def _left_out(self, epoch: int, stop: int) -> Counted:
        """What ``drop_last`` leaves out at the end of an epoch."""
        sampling = self._sampling()
        count = sampling.count(epoch)
        if not self._options.drop_last or stop >= count:
            return Counted()
        return Counted.of(sampling.ids(epoch, slice(stop, count)))

    def _replayed(self, epoch: int) -> Counted:
        """Samples of the past that come again in an epoch, besides each sample once."""
        sampling, found = self._sampling(), Counted()
        if isinstance(sampling, Replayed):
            count = sampling.count(epoch)
            for start in range(0, count, _REPLAYED_AT_ONCE):
                found += Counted.of(sampling.replayed_ids(epoch, slice(start, min(start + _REPLAYED_AT_ONCE, count))))
        return found

    def _sampling(self) -> Sampling:
        return build_order(self._source, global_batch=1, seed=self._seed, options=self._options).sampling


def _ids_of(batch: StepBatch) -> NDArray[np.int64]:
    """The samples that this rank computes in a step, in all of its rounds."""
    found = [one.sample_ids for part in batch.rounds if part is not None for one in part.microbatches]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _as_tensor(numbers: list[int], total: int) -> torch.Tensor:
    """Some counts and a sum of 128 bits; in words of 31 bits, which no backend changes."""
    return torch.tensor([*numbers, *(total >> (31 * place) & _WORD for place in range(_NUM_WORDS))], dtype=torch.int64)


def _from_tensor(told: torch.Tensor, count: int) -> tuple[Any, int]:
    values = [int(one) for one in told.tolist()]
    return tuple(values[:count]), sum(word << (31 * place) for place, word in enumerate(values[count:]))
