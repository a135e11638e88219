"""A step whose loss or gradient nobody should learn from: it is traced to its rank, told, and left out or the end of the run.

The reduced values are the same on every rank, so all ranks come here together and decide alike. But after the reduction every
rank also holds the same bad gradient, so where it came from is gone. Weights have not been touched yet and dropout is keyed, so
running the local microbatches again gives the same numbers: each rank looks at its own before they are added. Ranks that split
a model pass a bad value on within the same pass; they run the same operations in the same order, so the rank that met it first
has it. Ranks of a pipeline are told apart by how far a microbatch had come when it went bad.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.comm.channel import is_silent
from shoal.core.errors import FinalError
from shoal.core.events import LossSpiked, NonFinite, RolledBack
from shoal.data.loading.loader import StepBatch
from shoal.engine.config import TrainConfig
from shoal.engine.hooks import StepResult
from shoal.engine.model import ParallelModel
from shoal.engine.state import RankState
from shoal.parallel import batchnorm
from shoal.trainer.persist import Persistence
from shoal.trainer.progress import MOST_ROLLBACKS, Progress, after_rollback, loss_limit, rate_factor

_FINE = -2
_LOSS = -1
_NEVER = 2**62


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a non-finite value was first seen."""

    rank: int
    what: str
    """A parameter's name (whose gradient it is), ``weight`` and a name, or ``loss``."""


@dataclass
class _Sightings:
    """What one rank saw, in the order in which it ran."""

    clock: int = 0
    first_output: int = _NEVER
    first_gradient: int = _NEVER
    name: str = ""
    """The parameter of the first bad gradient."""


def trace_nonfinite(model: ParallelModel, batch: StepBatch, *, step: int, scale: float) -> Origin:
    """Find the rank that first met a value that is not finite. Every rank must call this together.

    Args:
        model: whose step it was.
        batch: what it ran on.
        step: its number.
        scale: the loss scale that it had.
    """
    # Of the whole model, so that all ranks mean the same parameter by a number.
    names = sorted({entry.parameter for entry in model.outline.values() if entry.parameter and entry.is_trained})
    runtime = model.runtime
    with _watching(model.model, names, runtime.clock if runtime is not None else None) as seen:
        losses = model.passes.accumulate(batch, step=step, scale=scale, reduce=False)
        loss = sum(float(one) for one in losses if one is not None)
        if runtime is not None and seen.first_output != _NEVER:
            loss = math.nan  # Only the last stage has the loss; the stage that spoilt it may be another.
    # The forward passes above left notes for the running statistics; they are of a step that counts for nothing.
    batchnorm.fold(model.model, keep=False)
    sighting, when = _FINE, _NEVER
    spoilt = [name for name, weight in model.reduction.updated.items() if not bool(torch.isfinite(weight).all())]
    if spoilt:
        # Told apart from its effects, which a split layer spreads to its neighbours.
        sighting, when = len(names) + names.index(spoilt[0]), -1
    elif not math.isfinite(float(loss)):
        sighting, when = _LOSS, seen.first_output
    elif seen.name:
        sighting, when = names.index(seen.name), seen.first_gradient
    found, first_rank = _gather(model, torch.tensor([sighting, when], device=model.world.device))
    told = sorted(
        (int(when), first_rank + place, int(sighting))
        for place, (sighting, when) in enumerate(found)
        if sighting != _FINE
    )
    if not told:
        # Finite on every rank alone: the overflow happened in the sum over ranks, or in the norm over all parameters.
        return Origin(rank=first_rank, what="sum over replicas" if model.mesh.replicas.size > 1 else "gradient norm")
    _, rank, place = told[0]
    if place == _LOSS:
        return Origin(rank=rank, what="loss")
    return Origin(rank=rank, what=f"weight {names[place - len(names)]}" if place >= len(names) else names[place])


def _gather(model: ParallelModel, own: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """What every rank saw, and the rank that the first is of: of all ranks, or of this island, which came here alone."""
    if model.islands is None:
        return model.world.all_gather(own), 0
    inside, size = model.mesh.everyone, own.numel()
    whole = own.new_zeros(size * inside.size)
    inside.all_gather(own, whole, [size] * inside.size)
    return list(torch.split(whole, size)), model.world.rank - inside.rank


@contextmanager
def _watching(model: nn.Module, names: Sequence[str], clock: Callable[[], int] | None) -> Iterator[_Sightings]:
    """Look at every module's output and every parameter's gradient; gradients are forgotten afterwards.

    ``clock`` says when it is, where the order of this rank's own work does not.
    """
    seen = _Sightings()
    trained = set(names)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in trained}

    def now() -> int:
        seen.clock += 1
        return seen.clock if clock is None else clock()

    def check_gradient(name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            when = now()
            if not seen.name and not bool(torch.isfinite(gradient).all()):
                seen.first_gradient, seen.name = when, name

        return hook

    def check_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if is_silent():
            return  # A unit of another stage, which is only asked for its shapes.
        when = now()
        if seen.first_output == _NEVER and not all(_is_finite(leaf) for leaf in tree_leaves(output)):
            seen.first_output = when

    handles: list[Any] = [
        parameter.register_hook(check_gradient(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
    ]
    handles += [module.register_forward_hook(check_output) for module in model.modules()]
    try:
        yield seen
        # What a split backward pass put off came past no hook.
        for name, parameter in parameters.items():
            if not seen.name and parameter.grad is not None and not _is_finite(parameter.grad):
                seen.first_gradient, seen.name = _NEVER - 1, name
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters.values():
            parameter.grad = None


def _is_finite(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())


# Each is an event; on the terminal a run that skips every step would drown everything else.
_SKIPS_SAID = 5


class Setbacks:
    """Handles the steps of one rank that are not taken.

    Args:
        config: what is to become of them.
        engine: of the steps.
        persistence: the run's checkpoints.
    """

    def __init__(self, config: TrainConfig, engine: ParallelModel, persistence: Persistence) -> None:
        self._config = config
        self._engine = engine
        self._persistence = persistence
        self._reporter = persistence.reporter

    def handle(self, batch: StepBatch, result: StepResult, progress: Progress) -> bool:
        """Tell of a step that was not taken; ``progress`` is that before it. True when it counts as left out.

        Raises:
            FinalError: it is not finite, and ``train.nonfinite`` is stop; names rank and parameter.
        """
        step, scale = progress.step + 1, progress.loss_scale
        if result.is_finite:
            limit = loss_limit(progress.recovery, self._config)
            self._reporter.event(LossSpiked(step=step, loss=result.loss, limit=limit))
            self._warn(
                f"step {step}: loss {result.loss:g} is above {limit:g}, train.spike {self._config.spike:g} times the usual",
                progress,
            )
            return True
        if self._engine.precision.scales_loss and math.isfinite(result.loss) and scale.can_back_off:
            return False  # An overflow of the scaled gradient is how dynamic scaling finds its scale.
        origin = trace_nonfinite(self._engine, batch, step=progress.step, scale=scale.scale)
        action = self._config.nonfinite
        self._reporter.event(NonFinite(step=step, culprit_rank=origin.rank, what=origin.what, action=action))
        where = f"step {step}: {origin.what} is not finite on rank {origin.rank}"
        if action == "skip":
            self._warn(where, progress)
            return True
        raise FinalError(
            f"{where} (loss {result.loss}, gradient norm {result.grad_norm}); {self._persistence.fall_back()}. "
            "Resume with a lower optim.lr or with optim.clip, or set train.nonfinite=skip to leave such steps out"
        )

    def _warn(self, what: str, progress: Progress) -> None:
        if progress.skipped < _SKIPS_SAID:
            islands, mesh = self._engine.islands, self._engine.mesh
            if islands is None:
                self._reporter.warn(f"{what}; the step is skipped on all ranks")
            else:
                where = f"the step is skipped on all ranks of island {islands.channel.rank}"
                self._reporter.warn(f"{what}; {where}", speaks=mesh.everyone.rank == 0)

    def roll_back(self, progress: Progress, state_at: Callable[[Progress], RankState]) -> Progress:
        """Load the last good checkpoint, and go on from it with a lower rate: too many steps in a row were left out.

        Args:
            progress: of the run as it is.
            state_at: this rank's state in a run that is so far, to be written to.

        Raises:
            FinalError: there is no good checkpoint, or the run has gone back often enough.
        """
        recovery = progress.recovery
        where = f"step {progress.step}: {recovery.left_out} steps in a row were left out"
        if recovery.rollbacks >= MOST_ROLLBACKS:
            raise FinalError(
                f"{where}, after {recovery.rollbacks} rollbacks with a lower rate each; {self._persistence.fall_back()}. "
                "Look at the data and the loss of these steps: going on with --resume meets them again. Where they were only "
                "above train.spike and finite, raise it; where they were not finite, lower optim.lr or set optim.clip"
            )
        restored = self._persistence.roll_back(state_at, self._engine.state_to_load)
        if restored is None:
            raise FinalError(
                f"{where}, and there is no good checkpoint to go back to; lower optim.lr, or set checkpoint.every so that "
                "there is one"
            )
        after = replace(restored.progress, recovery=after_rollback(recovery, restored.progress.recovery))
        factor = rate_factor(after.recovery, self._config)
        self._reporter.event(RolledBack(step=progress.step, to_step=after.step, rate_factor=factor))
        self._reporter.warn(
            f"rolled back from step {progress.step} to step {after.step}; the rate is now {factor:g} of the recipe's"
        )
        return after
