"""Callbacks that follow a number of the validation split: stop when it no longer gets better, keep the checkpoints of the best.

Both decide from an ``Evaluation``, whose numbers are reduced and therefore the same bits on every rank: all ranks stop and save
at the same step.
"""

import math
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import RequestError, RunError, did_you_mean
from shoal.engine.callback_config import EARLY_STOP, Mode, mode_of
from shoal.engine.evaluate import Evaluation
from shoal.engine.hooks import Hook, HookedModel, LoopRequests


class EarlyStopping(Hook):
    """Ends training when a metric has not got better in ``patience`` evaluations in a row.

    Args:
        metric: ``loss``, ``accuracy``, the name of one of the metrics that are evaluated, or ``ema_loss`` of averaged weights.
        patience: evaluations without an improvement after which training ends; at least 1.
        min_delta: by how much a value must be better than the best so far to count as an improvement.
        mode: ``min`` where smaller is better, ``max`` where larger is; left out, what the metric is known for.
    """

    name = "early_stopping"

    def __init__(
        self, metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, mode: Mode | None = None
    ) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise RequestError(
                f"patience {patience!r} counts evaluations without an improvement; it must be at least 1"
            )
        if not 0 <= min_delta < math.inf:
            raise RequestError(f"min_delta {min_delta} is by how much a value must be better; it must be at least 0")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.mode = mode_of(metric, mode)
        self.best: float | None = None
        """The best value so far; None before the first evaluation."""
        self.num_worse = 0
        """Evaluations in a row since then that were not better."""
        self.stopped_at: int | None = None
        """The step after which training ended; None while it goes on."""
        self._requests: LoopRequests | None = None

    def on_attach(self, model: HookedModel) -> None:
        """See ``Hook``."""
        self._requests = model.requests

    def on_evaluation(self, step: int, found: Evaluation) -> None:
        """See ``Hook``."""
        if found.split != "validation" or self.stopped_at is not None:
            return
        value = read_metric(found, self.metric)
        if _is_better(value, self.best, self.mode, self.min_delta):
            self.best, self.num_worse = value, 0
            return
        self.num_worse += 1
        if self.num_worse >= self.patience:
            self.stopped_at = step
            self._stop()

    def _stop(self) -> None:
        if self._requests is not None:
            times = "once" if self.num_worse == 1 else f"{self.num_worse} times in a row"
            self._requests.tell(
                f"stopped early after step {self.stopped_at}: {self.metric} was not better than "
                f"{'anything' if self.best is None else f'{self.best:.6g}'} {times}"
            )
            self._requests.stop(EARLY_STOP)

    def state(self) -> Mapping[str, Any]:
        """See ``Hook``."""
        return {"metric": self.metric, "best": self.best, "num_worse": self.num_worse, "stopped_at": self.stopped_at}

    def load_state(self, values: Mapping[str, Any] | None) -> None:
        """See ``Hook``. What was found for another metric says nothing of this one. One that had stopped stops again."""
        values = values if values is not None and values.get("metric") == self.metric else {}
        self.best = _number(values.get("best"))
        self.num_worse, self.stopped_at = _count(values.get("num_worse")) or 0, _count(values.get("stopped_at"))
        if self.stopped_at is not None and self.num_worse < self.patience:
            self.stopped_at = None  # It has more patience than before, and goes on.
        if self.stopped_at is not None:
            self._stop()


class BestCheckpoint(Hook):
    """Saves a checkpoint whenever a metric is among the best so far, and keeps these however old they become.

    Args:
        metric: as for ``EarlyStopping``.
        mode: as for ``EarlyStopping``.
        keep: how many of the best stay, at least 1. They are besides those that ``checkpoint.keep`` leaves.
    """

    name = "best_checkpoint"

    def __init__(self, metric: str = "loss", *, mode: Mode | None = None, keep: int = 1) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise RequestError(f"keep {keep!r} is how many of the best checkpoints stay; it must be at least 1")
        self.metric, self.mode, self.num_kept = metric, mode_of(metric, mode), keep
        self.best: list[tuple[float, int]] = []
        """Value and step of the best checkpoints, the best first; of equal ones the earlier comes first."""
        self._requests: LoopRequests | None = None

    @property
    def step(self) -> int | None:
        """The step of the best checkpoint; None before there is one."""
        return self.best[0][1] if self.best else None

    def on_attach(self, model: HookedModel) -> None:
        """See ``Hook``."""
        self._requests = model.requests

    def on_evaluation(self, step: int, found: Evaluation) -> None:
        """See ``Hook``."""
        value = read_metric(found, self.metric) if found.split == "validation" else math.nan
        if math.isnan(value):
            return
        others = [entry for entry in self.best if entry[1] != step]
        sign = 1.0 if self.mode == "min" else -1.0
        ordered = sorted([*others, (value, step)], key=lambda entry: (sign * entry[0], entry[1]))[: self.num_kept]
        if (value, step) in ordered and self._requests is not None:
            self._requests.save()
        self.best = ordered
        self._keep()

    def _keep(self) -> None:
        if self._requests is not None:
            self._requests.keep(f"{self.name} {self.metric}", [step for _, step in self.best])

    def state(self) -> Mapping[str, Any]:
        """See ``Hook``."""
        return {"metric": self.metric, "best": [[value, step] for value, step in self.best]}

    def load_state(self, values: Mapping[str, Any] | None) -> None:
        """See ``Hook``. What was found for another metric says nothing of this one."""
        values = values if values is not None and values.get("metric") == self.metric else {}
        self.best = [(_number(value) or 0.0, _count(step) or 0) for value, step in values.get("best", [])]
        self._keep()


def read_metric(found: Evaluation, metric: str) -> float:
    """The number that a callback follows.

    Raises:
        RunError: the evaluation has none of this name.
    """
    value = found.value_of(metric)
    if value is None:
        names = ["loss", *(["accuracy"] if found.accuracy is not None else []), *found.metrics]
        raise RunError(
            f"a callback follows the metric {metric!r} and evaluations have none of that name; {did_you_mean(metric, names)}"
        )
    return value


def _is_better(value: float, best: float | None, mode: Mode, min_delta: float) -> bool:
    """NaN is better than nothing."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return best - value > min_delta if mode == "min" else value - best > min_delta


def _number(value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise RunError(f"the checkpoint's state of a callback is none: {str(value)[:80]!r} is no number")
    return None if value is None else float(value)


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise RunError(f"the checkpoint's state of a callback is none: {str(value)[:80]!r} is no count")
    return None if value is None else int(value)
