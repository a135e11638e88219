"""The ``callbacks`` of a recipe, ``train.early_stop`` and the names of metrics, as values. No torch."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shoal.core.config import Config, tagged
from shoal.core.errors import RequestError, did_you_mean

Mode = Literal["min", "max"]
BUILT_IN: dict[str, Mode] = {"loss": "min", "accuracy": "max"}
"""What every evaluation has (accuracy where it makes sense), and what is better."""
SHIPPED: dict[str, Mode] = {
    "accuracy": "max",
    "f1": "max",
    "mae": "min",
    "perplexity": "min",
    "rmse": "min",
}
"""Metrics by name, and what is better; ``topK``, such as ``top5``, is another."""
_TOP = re.compile(r"top[1-9][0-9]{0,5}", re.ASCII)
EARLY_STOP = "early_stop"
"""Why a run ended that stopped getting better; in its summary as ``stopped_by``."""
AVERAGED = "ema_"
"""Begins the names of what was evaluated with averaged weights."""


def is_shipped(name: str) -> bool:
    """True for the name of a metric that Shoal ships."""
    return name in SHIPPED or _TOP.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """True for a metric of the user's own, named as ``package.module:function``."""
    return ":" in name


def metric_name(text: str) -> str:
    """What a metric is called in results: its name, or that of the user's own function."""
    return text.rpartition(":")[2]


def check_followed(
    callbacks: Sequence["AnyCallbackConfig"],
    early_stop: "EarlyStopConfig | None",
    *,
    metrics: Sequence[str],
    evaluate_every: int,
    num_validation: int | None,
) -> None:
    """Refuse callbacks that follow what no evaluation will find.

    Args:
        callbacks: of the recipe.
        early_stop: of ``train``.
        metrics: of ``eval``.
        evaluate_every: ``eval.every``.
        num_validation: samples of the validation split; None where nobody knows yet.

    Raises:
        RequestError: names the key, what it follows and what there is.
    """
    averages = any(isinstance(config, EMAConfig) and config.evaluate for config in callbacks)
    plain = ["loss", "accuracy", *map(metric_name, metrics)]
    known = [*plain, *(f"{AVERAGED}{name}" for name in plain if averages)]
    following: list[tuple[str, str]] = [
        (f"callbacks[{place}] ({config.name})", config.metric)
        for place, config in enumerate(callbacks)
        if isinstance(config, BestCheckpointConfig | EarlyStoppingConfig)
    ]
    if early_stop is not None:
        following.append(("train.early_stop", early_stop.metric))
    for key, metric in following:
        if metric not in known:
            is_average = metric.startswith(AVERAGED) and not averages
            advice = (
                "add the callback ema"
                if is_average
                else f"one of your own goes into eval.metrics; {did_you_mean(metric, known)}"
            )
            raise RequestError(f"{key} follows the metric {metric!r}, which no evaluation will have; {advice}")
        if evaluate_every == 0:
            raise RequestError(
                f"{key} decides after evaluations, and eval.every is 0: there would be none; set eval.every"
            )
        if num_validation == 0:
            raise RequestError(
                f"{key} follows the validation split, and the data has none; give it one, or leave {key} out"
            )


def mode_of(metric: str, mode: Mode | None) -> Mode:
    """Whether smaller or larger is better.

    Raises:
        RequestError: the metric is not known for either, and ``mode`` does not say.
    """
    if mode in ("min", "max"):
        return mode
    if mode is not None:
        raise RequestError(f'mode={mode!r} is none; set mode to "min" where smaller is better, or to "max"')
    known: Mode | None = {**SHIPPED, **BUILT_IN}.get(name := metric.removeprefix(AVERAGED))
    if known is None and _TOP.fullmatch(name):
        known = "max"
    if known is None:
        raise RequestError(
            f'nobody knows whether a smaller {metric!r} is better or a larger one; set mode to "min" or to "max"'
        )
    return known


class _Following(Config):
    """What is common to callbacks that follow a metric."""

    metric: str = "loss"
    """The number of the validation split that it follows: loss, accuracy, one of eval.metrics, or ema_loss and the like."""
    mode: Mode | None = None
    """Whether smaller (min) or larger (max) is better; known for the metrics that Shoal ships."""

    @model_validator(mode="after")
    def _has_a_mode(self) -> "_Following":
        try:
            mode_of(self.metric, self.mode)
        except RequestError as error:
            raise ValueError(str(error)) from error
        return self


class EarlyStopConfig(_Following):
    """When training ends because a metric no longer gets better."""

    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without an improvement after which training ends."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """By how much a value must be better than the best so far to be an improvement."""


class EarlyStoppingConfig(EarlyStopConfig):
    """Early stopping as a callback; ``train.early_stop`` is the same."""

    name: Literal["early_stopping"]
    """Ends training when a metric no longer gets better."""


class BestCheckpointConfig(_Following):
    """The checkpoints of the best values of a metric."""

    name: Literal["best_checkpoint"]
    """Saves a checkpoint whenever a metric is among the best, and keeps it."""
    keep: int = Field(default=1, ge=1)
    """How many of the best are kept, besides those that checkpoint.keep leaves."""


class EMAConfig(Config):
    """An exponential moving average of the weights."""

    name: Literal["ema"]
    """Averages the trained weights, and saves the average in checkpoints."""
    decay: float = Field(default=0.999, ge=0, lt=1)
    """How much of the average stays at each update."""
    start: int = Field(default=0, ge=0)
    """Steps until which the average is the weights themselves."""
    every: int = Field(default=1, ge=1)
    """Steps between updates of the average."""
    evaluate: bool = True
    """Evaluate the averaged weights as well, as ema_loss, ema_accuracy and so on."""


class OwnCallbackConfig(Config):
    """A callback of the user's own."""

    build: str
    """The function or class that returns a shoal.Hook, as package.module:function."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, by name."""


def _as_table(value: Any) -> Any:
    """A callback that is written as a text is a table with nothing but its name."""
    if isinstance(value, str):
        return {"build": value} if is_own(value) else {"name": value}
    return value


AnyCallbackConfig = EMAConfig | BestCheckpointConfig | EarlyStoppingConfig | OwnCallbackConfig
if TYPE_CHECKING:
    CallbackConfig = AnyCallbackConfig
else:
    CallbackConfig = Annotated[
        tagged(EMAConfig, BestCheckpointConfig, EarlyStoppingConfig, OwnCallbackConfig, key="name"),
        BeforeValidator(_as_table),
    ]
    """One entry of ``callbacks``: a name, ``package.module:function``, or a table with one of them and its settings."""
