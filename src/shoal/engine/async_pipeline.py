"""Steps of an asynchronous pipeline: windows of steps that follow one another without the pipeline running empty.

Weights change while microbatches are under way, each stage by itself. A window ends where the run wants all stages at the same
point: before a checkpoint, an evaluation or a comparison of replicas. How long windows are changes no bit, because the rules
that say which version a microbatch uses count microbatches and not windows (``pipeline/versions.py``).

Under ``pipedream`` and ``pipedream-vsync`` every microbatch is an update and a tick of the learning rate; under
``pipedream-2bw`` a step is. Clipping is by the norm of the stage's own gradient: that of the others is not known yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from shoal.core.axes import Axis
from shoal.core.errors import FinalError
from shoal.core.placement import place_whole
from shoal.core.plan import Plan
from shoal.data.loading.loader import Microbatch, StepBatch
from shoal.engine.hooks import StepResult
from shoal.engine.passes import Passes, StepFeed
from shoal.engine.resolve import schedule_of, updates_per_step
from shoal.engine.state import RankState
from shoal.engine.stop import StopRequest
from shoal.optim.build import set_rate
from shoal.parallel import batchnorm
from shoal.parallel.gradnorm import clip_, global_norm
from shoal.pipeline.build import Pipeline
from shoal.pipeline.reduction import sum_gradients_
from shoal.pipeline.runtime import Runtime
from shoal.pipeline.versions import VersionRule, Versions

LONGEST_WINDOW = 8
"""Steps; a request to stop is heard when one ends, and its batches are in memory at once."""


@dataclass
class _Window:
    """What is found out while one window runs."""

    step: int
    """Its first."""
    rates: Sequence[float]
    """Of every update, in their order."""
    squares: dict[int, float] = field(default_factory=dict)
    """Of the norm of this stage's gradient, by update."""


class AsyncPipeline:
    """The asynchronous steps of one rank.

    Args:
        passes: what runs microbatches.
        pipeline: this rank's stage.
        plan: resolved.
        optimizer: of this stage's weights.
        max_norm: what the norm of this stage's gradient is clipped to; None where it is not.
        stop: this rank's request to stop.
    """

    def __init__(
        self,
        passes: Passes,
        pipeline: Pipeline,
        plan: Plan,
        *,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        stop: StopRequest,
    ) -> None:
        self.pipeline = pipeline
        self.plan = plan
        self._passes, self._mesh = passes, passes.mesh
        self._optimizer, self._max_norm, self._stop = optimizer, max_norm, stop
        self.longest = LONGEST_WINDOW
        self.start = 0
        """The step at which this history of versions began: 0, or where a run went on from another plan's checkpoint."""
        self._microbatches = plan.microbatches or 1
        self._updates = updates_per_step(plan)
        schedule = pipeline.schedule
        rule = VersionRule(
            updates=schedule.updates, num_stages=schedule.grid.num_stages, accumulate=schedule.accumulate
        )
        self.versions = Versions(self.pipeline.trained, rule, stage=pipeline.rank)
        self._runtimes: dict[int, Runtime] = {}
        self._window: _Window | None = None
        self._first = 0

    @property
    def signature(self) -> str:
        """What must be the same for the versions of a checkpoint to be gone on with."""
        places = ",".join(map(str, self.pipeline.stages.starts))
        return f"{self.pipeline.schedule.name} pp={self.plan.pp} microbatches={self._microbatches} stages={places}"

    def describe(self) -> list[str]:
        """What is not as in a synchronous run, for people."""
        name = self.pipeline.schedule.name
        lines = [
            f"pp: {name} updates each stage without waiting for the others; it does not compute what one process does"
        ]
        if self._updates > 1:
            lines.append(f"pp: every microbatch is an update and a tick of the learning rate, {self._updates} per step")
        if self._max_norm is not None:
            lines.append(f"pp: gradients are clipped by the norm of each stage's own, to {self._max_norm:g}")
        return lines

    def window_ticks(self, step: int, count: int) -> range:
        """The updates of ``count`` steps from ``step`` on, counted through the run."""
        return range(step * self._updates, (step + count) * self._updates)

    def train_steps(self, batches: Sequence[StepBatch], *, step: int, rates: Sequence[float]) -> list[StepResult]:
        """Take steps from number ``step`` (counted from 0) on, one per batch, and empty the pipeline.

        Args:
            batches: one per step.
            step: the first.
            rates: the learning rate of each update.
        """
        hooks = self._passes.hooks
        for place, batch in enumerate(batches):
            for hook in hooks:
                hook.on_step_start(step + place, batch)
        microbatches = [microbatch for batch in batches for microbatch in self._passes.filler.fill(batch)]
        count, own = len(microbatches), self._microbatches
        totals = self._total_weights(microbatches)
        by_step = [sum(totals[first : first + own]) for first in range(0, count, own)]
        weights = totals if self._updates > 1 else [by_step[place // own] for place in range(count)]
        self._window = _Window(step=step, rates=rates)
        feed = self._passes.feed(
            microbatches,
            shares=[one.weight / max(1.0, weight) for one, weight in zip(microbatches, weights, strict=True)],
            steps=[step + place // own for place in range(count)],
            indices=range(count),
        )
        self._first = (step - self.start) * own
        self._runtime(len(batches)).step(feed, first=self._first)
        for place in range(count):
            for hook in hooks:
                hook.on_microbatch(step + place // own, place % own, feed.losses.get(place))
        if self._passes.has_batch_norm:
            # As one process goes through them: update by update, and of each the replicas in turn.
            each = own // self._updates
            for first in range(0, count, each):
                batchnorm.fold(self._passes.objective.model, rows=range(first, first + each))
        results = self._results(feed, by_step, weights)
        for place, result in enumerate(results):
            for hook in hooks:
                hook.on_update(step + place, result)
        return results

    def _runtime(self, steps: int) -> Runtime:
        if steps not in self._runtimes:
            self._runtimes[steps] = Runtime(
                self.pipeline.chain,
                schedule_of(self.plan, steps=steps),
                rank=self.pipeline.rank,
                p2p=self.pipeline.p2p,
                versions=self.versions,
                update=self._update,
            )
        found = self._runtimes[steps]
        found.observe = self._passes.observer()
        return found

    def _total_weights(self, microbatches: Sequence[Microbatch]) -> list[float]:
        """Of each microbatch, over all replicas."""
        told = torch.tensor(
            [one.weight for one in microbatches], dtype=torch.float64, device=self._passes.objective.device
        )
        found: list[float] = self._mesh.channel(Axis.DATA).all_reduce_(told).tolist()
        return found

    def _update(self, microbatch: int) -> None:
        """Change this stage's weights; ``microbatch`` is the last of those that the update learns from."""
        window = self._window
        assert window is not None
        trained = self.versions.parameters
        update = (microbatch - self._first + 1) * self._updates // self._microbatches - 1
        self._passes.enter("optimizer", window.step + update // self._updates)
        sum_gradients_(trained, self._mesh.replicas)
        for hook in self._passes.hooks:
            hook.on_gradients(window.step + update // self._updates, trained, 1.0)
        gradients = {name: value.grad for name, value in trained.items() if value.grad is not None}
        norm = global_norm(gradients.items(), exact=self._max_norm is not None)
        window.squares[update] = norm * norm
        if math.isfinite(norm):
            clip_(gradients.values(), norm=norm, limit=self._max_norm)
        set_rate(self._optimizer, window.rates[update])
        self._optimizer.step()

    def _results(self, feed: StepFeed, by_step: Sequence[float], weights: Sequence[float]) -> list[StepResult]:
        """One per step: loss and norm over all ranks, as every rank knows them; with them goes the request to stop."""
        window, own, mesh = self._window, self._microbatches, self._mesh
        assert window is not None
        steps = len(by_step)
        speaks = mesh.replicas.rank == 0
        # By step: its loss, the square of its last update's norm, and how many of its updates are not finite on some stage.
        numbers = torch.zeros(3 * steps + 1, dtype=torch.float64)
        for place, weight in enumerate(by_step):
            for index in range(place * own, (place + 1) * own):
                if index in feed.losses:
                    # A share was of its update's samples; here it is of its step's.
                    numbers[place] += feed.losses[index].double().cpu() * (weights[index] / max(1.0, weight))
            squares = [window.squares[update] for update in range(place * self._updates, (place + 1) * self._updates)]
            numbers[steps + place] = squares[-1] if speaks else 0.0
            numbers[2 * steps + place] = sum(not math.isfinite(square) for square in squares)
        numbers[-1] = float(self._stop.is_requested)
        told = mesh.everyone.all_reduce_(numbers.to(self._passes.objective.device)).tolist()
        self._stop.agree(any_rank=told[-1] > 0)
        finite = [math.isfinite(told[place]) and told[2 * steps + place] == 0 for place in range(steps)]
        return [
            StepResult(
                loss=told[place],
                grad_norm=math.sqrt(told[steps + place]),
                is_finite=finite[place],
                is_taken=finite[place],
            )
            for place in range(steps)
        ]

    @property
    def lag(self) -> int:
        """Steps until every stage has computed with the weights of a checkpoint: older versions come first."""
        return 1 + -(-self.plan.pp // self._microbatches)

    def window_length(self, step: int, total_steps: int, periods: Sequence[int]) -> int:
        """Steps from ``step`` on until something wants the pipeline empty: the end, or what happens every so many steps."""
        if step == 0:
            return 1  # so that there is something to see soon
        ends = [total_steps, step + self.longest, *(step + every - step % every for every in periods if every)]
        return min(ends) - step

    # --- what a checkpoint keeps of it

    def add_versions(self, state: RankState, step: int) -> RankState:
        """What a rank holds after ``step`` steps, with the older versions that later microbatches will use."""
        first = (step - self.start) * self._microbatches
        newest = self.versions.newest_at(first)
        older = {
            f"versions/{newest - version}/{name}": tensor.detach()
            for version in self.versions.wanted(first)
            for name, tensor in self.versions.sets[version].items()
        }
        placements = {name: place_whole(tensor.shape) for name, tensor in older.items()}
        return replace(state, tensors={**state.tensors, **older}, placements={**state.placements, **placements})

    def resume_at(self, step: int, *, signature: str, start: int) -> None:
        """Make room for the versions of a checkpoint after ``step`` steps, whose history has this signature and start.

        Where they are another pipeline's, a new history begins there.
        """
        self.start = start if signature == self.signature else step
        self.versions.begin_at((step - self.start) * self._microbatches)


def nonfinite_error(result: StepResult, *, step: int, plan: Plan, fallback: str) -> FinalError:
    """The end of a run whose loss or gradient is not a number any more."""
    return FinalError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm} under schedule={plan.schedule}, whose stages update "
        f"before they know of each other; {fallback}. Resume with a lower optim.lr or with optim.clip; "
        "schedule=1f1b names the rank and the parameter"
    )
