"""From the ``callbacks`` of a recipe to hooks."""

from collections.abc import Sequence
from typing import assert_never

from shoal.core.errors import RequestError
from shoal.core.functions import bind_arguments, call_own, load_function
from shoal.data.loading.planning import Cached
from shoal.data.source import Source
from shoal.engine.callback_config import (
    AnyCallbackConfig,
    BestCheckpointConfig,
    EarlyStopConfig,
    EarlyStoppingConfig,
    EMAConfig,
    OwnCallbackConfig,
)
from shoal.engine.callbacks.cachereports import CacheReports
from shoal.engine.callbacks.ema import EMA
from shoal.engine.callbacks.monitor import BestCheckpoint, EarlyStopping
from shoal.engine.hooks import Hook
from shoal.engine.reporting import Reporter


def build_callbacks(configs: Sequence[AnyCallbackConfig]) -> list[Hook]:
    """The hooks that a recipe names, in their order.

    Raises:
        RequestError: one of the user's own cannot be imported or called, or is no hook.
    """
    return [_build(config) for config in configs]


def cache_reports(source: Source, reporter: Reporter) -> list[Hook]:
    """The hook that says what the cache of the data has done, where there is one."""
    if not isinstance(source, Cached):
        return []
    opened = source.cache_report()
    return [] if opened is None else [CacheReports(source, reporter, opened)]


def early_stopping(config: EarlyStopConfig | None, evaluate_every: int) -> list[Hook]:
    """The hook of ``train.early_stop``; none where that is not set.

    Raises:
        RequestError: there would be no evaluations to decide by.
    """
    if config is None:
        return []
    if evaluate_every == 0:
        raise RequestError(
            "train.early_stop decides after evaluations, and eval.every is 0: there would be none; set eval.every"
        )
    return [_stop_early(config)]


def _build(config: AnyCallbackConfig) -> Hook:
    match config:
        case EMAConfig():
            return EMA(config.decay, start=config.start, every=config.every, evaluate=config.evaluate)
        case BestCheckpointConfig():
            return BestCheckpoint(config.metric, mode=config.mode, keep=config.keep)
        case EarlyStoppingConfig():
            return _stop_early(config)
        case OwnCallbackConfig():
            return _build_own(config)
    assert_never(config)


def _stop_early(config: EarlyStopConfig) -> EarlyStopping:
    return EarlyStopping(config.metric, patience=config.patience, min_delta=config.min_delta, mode=config.mode)


def _build_own(config: OwnCallbackConfig) -> Hook:
    what = f"callbacks: {config.build}"
    function = load_function(config.build, key="callbacks")
    bind_arguments(function, config.args, key=what)
    found = call_own(lambda: function(**config.args), what=what)
    if not isinstance(found, Hook):
        raise RequestError(f"{what} returned a {type(found).__name__}; it must return a shoal.Hook")
    return found
