"""How far a run is: a frozen value that every checkpoint keeps as JSON. No torch.

It also remembers the steps that were left out because their loss jumped, so that a resumed run decides as the one that was left
alone. A jump is measured against the median of the last losses, which a few wild ones do not move; all ranks have these losses
alike, so the decisions below are pure functions of them.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import NoneType
from typing import Any, Protocol

from shoal.core.errors import RunError
from shoal.data.order import Position
from shoal.data.receipt import ReceiptState
from shoal.engine.config import TrainConfig
from shoal.optim.precision import LossScale
from shoal.optim.rates import PlateauState

_MAX_COUNT = 2**62
_FORMER_KEYS = {"stream": "async_signature", "stream_start": "async_start"}
"""Of checkpoints that were written before these fields had their present names."""
_RARE = ("validation_metrics", "callbacks", "receipt")
WINDOW = 16
"""Losses of taken steps that a loss is compared with."""
LEAST = 4
"""Fewer say nothing yet, and no step is left out."""
MOST_ROLLBACKS = 8
"""After so many the rate is not what is wrong."""


class Validation(Protocol):
    """What a run remembers of an evaluation."""

    @property
    def loss(self) -> float:
        """Mean over the split."""

    @property
    def accuracy(self) -> float | None:
        """Share of targets with the highest score; None where that makes no sense."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Others by name."""


class Outcome(Protocol):
    """What came out of a step."""

    @property
    def loss(self) -> float:
        """Mean over the global batch."""

    @property
    def is_taken(self) -> bool:
        """The weights were updated."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a run remembers of the steps that it left out."""

    losses: tuple[float, ...] = ()
    """Of the last steps that were taken, where ``train.spike`` asks for them."""
    left_out: int = 0
    """Steps in a row that were not taken, up to now."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is; replaced, never changed, after each step."""

    step: int = 0
    position: Position
    loss_scale: LossScale = field(default_factory=LossScale)
    plateau: PlateauState = field(default_factory=PlateauState)
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    """Share of validation targets with the highest score; None where that makes no sense."""
    tokens: int = 0
    skipped: int = 0
    """Steps whose update was left out."""
    recovery: Recovery = field(default_factory=Recovery)
    async_signature: str = ""
    """Of an asynchronous pipeline: what its versions of weights belong to; empty without one."""
    async_start: int = 0
    """The step at which its history of versions began."""
    trained_seconds: float = 0.0
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
    """By name: those of ``eval.metrics``, and those of averaged weights."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """What hooks remember, by their names; filled in when it is saved."""
    receipt: ReceiptState | None = None
    """What all ranks have trained on in this epoch, as of the last time when they counted together; None without a receipt."""

    def after(
        self,
        result: Outcome,
        *,
        position: Position,
        tokens: int,
        seconds: float,
        receipt: ReceiptState | None = None,
    ) -> "Progress":
        """One step further."""
        return replace(
            self,
            step=self.step + 1,
            position=position,
            first_loss=result.loss if self.first_loss is None else self.first_loss,
            last_loss=result.loss,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (not result.is_taken),
            trained_seconds=self.trained_seconds + seconds,
            receipt=receipt,
        )

    def validated(self, found: Validation | None) -> "Progress":
        """With what an evaluation on the validation split found; None where there is no such split."""
        if found is None:
            return replace(self, validation_loss=None, validation_accuracy=None, validation_metrics={})
        return replace(
            self,
            validation_loss=found.loss,
            validation_accuracy=found.accuracy,
            validation_metrics=dict(found.metrics),
        )

    def as_values(self) -> dict[str, Any]:
        """JSON for the manifest; what few runs have is left out where there is nothing of it."""
        values = asdict(self)
        values["receipt"] = None if self.receipt is None else self.receipt.as_values()
        if not self.position.stream:
            del values["position"]["stream"]
        if not self.position.version:
            del values["position"]["version"]
        return {key: value for key, value in values.items() if value or key not in _RARE}

    @classmethod
    def from_values(cls, values: Any, *, origin: str) -> "Progress":
        """Back from the manifest's JSON.

        Raises:
            RunError: a field is missing, left over or impossible.
        """
        try:
            plain: dict[str, Any] = {_FORMER_KEYS.get(str(key), str(key)): value for key, value in dict(values).items()}
            recovery = dict(plain.pop("recovery", {}))
            receipt = plain.pop("receipt", None)
            progress = cls(
                position=Position(**plain.pop("position")),
                loss_scale=LossScale(**plain.pop("loss_scale")),
                plateau=PlateauState(**plain.pop("plateau")),
                recovery=Recovery(**{**recovery, "losses": tuple(recovery.get("losses", ()))}),
                validation_metrics=dict(plain.pop("validation_metrics", {})),
                callbacks=dict(plain.pop("callbacks", {})),
                receipt=None if receipt is None else ReceiptState.from_values(receipt),
                **plain,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{origin} does not say how far it was: {error}") from error
        impossible = _impossible(progress)
        if impossible is not None:
            name, value = impossible
            raise RunError(f"{origin} says that it was at an impossible place: {name} is {str(value)[:80]!r}")
        return progress


class AsyncHistory(Protocol):
    """What a run remembers of an asynchronous pipeline."""

    @property
    def signature(self) -> str:
        """What its versions of weights belong to."""

    @property
    def start(self) -> int:
        """The step at which its history of versions began."""


def signed(progress: Progress, pipeline: AsyncHistory | None) -> Progress:
    """The progress with the history of versions that an asynchronous pipeline has; unchanged without one."""
    if pipeline is None:
        return progress
    return replace(progress, async_signature=pipeline.signature, async_start=pipeline.start)


def went_on(progress: Progress, pipeline: AsyncHistory | None) -> tuple[Progress, str | None]:
    """The progress of a checkpoint as that of a run which goes on from it, and what to tell the user, if anything."""
    # A synchronous pipeline has no history of versions that a later one could go on with.
    found = signed(replace(progress, async_signature="", async_start=0), pipeline)
    if pipeline is None or not pipeline.start == found.step > 0:
        return found, None
    return found, (
        f"the checkpoint has no versions of weights for {pipeline.signature}: a new history begins at step {found.step}, as at "
        "the start of a run"
    )


def _impossible(progress: Progress) -> tuple[str, Any] | None:
    """The first field whose value no run can have."""
    scale, plateau, recovery = progress.loss_scale, progress.plateau, progress.recovery
    counts = {
        "step": progress.step,
        "tokens": progress.tokens,
        "skipped": progress.skipped,
        "async_start": progress.async_start,
        "position.epoch": progress.position.epoch,
        "position.offset": progress.position.offset,
        "position.version": progress.position.version,
        "loss_scale.good_steps": scale.good_steps,
        "plateau.num_worse": plateau.num_worse,
        "recovery.left_out": recovery.left_out,
        "recovery.rollbacks": recovery.rollbacks,
    }
    losses = {
        "first_loss": progress.first_loss,
        "last_loss": progress.last_loss,
        "validation_loss": progress.validation_loss,
        "plateau.best": plateau.best,
        **{f"recovery.losses[{place}]": loss for place, loss in enumerate(recovery.losses)},
    }
    above_zero = {"loss_scale.scale": scale.scale, "plateau.factor": plateau.factor}
    # By exact type: True is an int in Python, and no count.
    wrong: list[tuple[str, Any]] = [
        item for item in counts.items() if type(item[1]) is not int or not 0 <= item[1] <= _MAX_COUNT
    ]
    wrong += [(name, loss) for name, loss in losses.items() if type(loss) not in (float, int, NoneType)]
    wrong += [
        (name, one) for name, one in above_zero.items() if type(one) not in (float, int) or not 0 < one < math.inf
    ]
    seconds = progress.trained_seconds
    if type(seconds) not in (float, int) or not 0 <= seconds < math.inf:
        wrong.append(("trained_seconds", seconds))
    wrong += [(f"callbacks.{name}", one) for name, one in progress.callbacks.items() if not isinstance(one, Mapping)]
    wrong += [
        (f"validation_metrics.{name}", one)
        for name, one in progress.validation_metrics.items()
        if type(one) not in (float, int)
    ]
    if type(progress.position.stream) is not str:
        wrong.append(("position.stream", progress.position.stream))
    if type(progress.async_signature) is not str:
        wrong.append(("async_signature", progress.async_signature))
    return wrong[0] if wrong else None


def loss_limit(state: Recovery, config: TrainConfig) -> float:
    """The loss above which a step is not taken; infinite where none is too high."""
    if config.spike is None or len(state.losses) < LEAST:
        return math.inf
    usual = statistics.median(state.losses)
    # A loss that is negative, or nothing, has no multiple that would be too high.
    return config.spike * usual if usual > 0 else math.inf


def after_step(state: Recovery, loss: float, config: TrainConfig, *, is_taken: bool) -> Recovery:
    """What is remembered after one more step."""
    if not is_taken:
        return replace(state, left_out=state.left_out + 1)
    losses = (*state.losses, loss)[-WINDOW:] if config.spike is not None else ()
    return replace(state, losses=losses, left_out=0)


def wants_rollback(state: Recovery, config: TrainConfig) -> bool:
    """True when so many steps in a row were left out that the run goes back."""
    return config.rollback_after > 0 and state.left_out >= config.rollback_after


def rate_factor(state: Recovery, config: TrainConfig) -> float:
    """What the learning rate is multiplied by."""
    return config.rollback_rate**state.rollbacks


def after_rollback(state: Recovery, restored: Recovery) -> Recovery:
    """What is remembered after going back from ``state`` to a checkpoint that had ``restored``."""
    return replace(restored, left_out=0, rollbacks=state.rollbacks + 1)


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What a run is between two steps but for its tensors: kept by runs that may have to go on from there without a checkpoint.

    After a step's update comes what the recipe wants between steps: an evaluation, a save. A rank may be lost in the middle of
    that, when the step counts already and the rest has not happened yet: the step is then *unsettled*, and whoever goes on from
    it does the rest again, from what was known before it began.
    """

    progress: Progress
    """With what hooks remember."""
    unsettled: bool | None = None
    """Whether the last step was taken, while what comes after it is not over; None when that is done."""

    def as_values(self) -> dict[str, Any]:
        """As JSON."""
        return {"progress": self.progress.as_values(), "unsettled": self.unsettled}

    @classmethod
    def from_values(cls, values: Any, *, origin: str) -> "Boundary":
        """Back from JSON.

        Raises:
            RunError: it is something else.
        """
        unsettled = values.get("unsettled") if isinstance(values, dict) else ""
        if unsettled not in (True, False, None):
            raise RunError(f"{origin} does not say what came after its last step: {unsettled!r}")
        return cls(progress=Progress.from_values(values.get("progress"), origin=origin), unsettled=unsettled)


class Boundaries:
    """The newest boundary, and the one before; empty while nobody asks for it."""

    def __init__(self) -> None:
        self.is_kept = False
        self.known: tuple[Boundary, ...] = ()
        """Newest last, of different steps."""
        self.when_updated: Callable[[int], None] = lambda step: None
        """Called with the number of steps, right after a step's update is everywhere that this rank reads it."""

    def note(
        self, progress: Progress, callbacks: Callable[[], Mapping[str, Any]], *, unsettled: bool | None = None
    ) -> None:
        """The run has come to a boundary; ``callbacks`` says what hooks remember."""
        if not self.is_kept:
            return
        if unsettled is not None:
            self.when_updated(progress.step)
        self.put(Boundary(progress=replace(progress, callbacks=callbacks()), unsettled=unsettled))

    def put(self, boundary: Boundary) -> None:
        """Keep a boundary in place of an older one."""
        before = [one for one in self.known if one.progress.step < boundary.progress.step]
        self.known = (*before[-1:], boundary)

    @property
    def unsettled(self) -> bool | None:
        """Of the newest."""
        return self.known[-1].unsettled if self.known else None
