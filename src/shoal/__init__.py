"""Shoal trains PyTorch models across processes: the same module, the same numbers, on one or on many.

Everything that a script needs is importable from here, and is imported when it is first used: ``import shoal`` alone must stay
quick, and must not import torch. ``docs/api.md`` describes every name; it and the types in ``__init__.pyi`` are written by
``python docs/make_api.py`` from what is listed here.
"""

import importlib
import sys
import types
from typing import Any

# Where each name lives, by subject; the subjects are the headings of docs/api.md.
_SUBJECTS = {
    "Training in a script's own loop": {
        "Run": "shoal.library.run",
        "RunLoader": "shoal.library.loader",
        "find_rate": "shoal.library.rates",
        "RateCurve": "shoal.engine.callbacks.ratefinder",
    },
    "Training by a recipe's parts": {
        "Trainer": "shoal.trainer.loop",
        "TrainConfig": "shoal.engine.config",
        "OptimConfig": "shoal.optim.config",
        "EvalConfig": "shoal.trainer.config",
        "CheckpointConfig": "shoal.checkpoint.config",
        "ElasticConfig": "shoal.trainer.config",
        "ParallelConfig": "shoal.parallel.analysis.structure",
        "PipelineConfig": "shoal.pipeline.config",
        "TelemetryConfig": "shoal.telemetry.config",
    },
    "Losses": {
        "all_gather": "shoal.comm.global_batch",
        "StepFunction": "shoal.engine.objective",
    },
    "Data": {
        "from_datasets": "shoal.data.sources.own",
        "LoaderOptions": "shoal.data.options",
        "PadCollate": "shoal.data.batches.padding",
        "PackedSource": "shoal.data.batches.packing",
    },
    "Weights": {
        "load_weights": "shoal.engine.weights",
        "LoadedWeights": "shoal.checkpoint.pretrained",
    },
    "Hooks": {
        "Hook": "shoal.engine.hooks",
        "StepResult": "shoal.engine.hooks",
        "Evaluation": "shoal.engine.evaluate",
    },
    "Callbacks, metrics and loggers": {
        "EarlyStopping": "shoal.engine.callbacks.monitor",
        "BestCheckpoint": "shoal.engine.callbacks.monitor",
        "EMA": "shoal.engine.callbacks.ema",
        "Metric": "shoal.engine.metrics",
        "GatheredMetric": "shoal.engine.metrics",
        "Logger": "shoal.telemetry.loggers",
        "LogConfig": "shoal.telemetry.config",
    },
    "Plans and recipes": {
        "Plan": "shoal.core.plan",
        "Recipe": "shoal.trainer.config",
        "load_recipe": "shoal.trainer.config",
    },
    "Questions": {
        "verify": "shoal.verify.session",
        "Certificate": "shoal.verify.certificate",
        "PlanResult": "shoal.verify.result",
        "MutantResult": "shoal.verify.certificate",
        "plan": "shoal.tuning.planning",
        "Answer": "shoal.tuning.planning",
        "simulate": "shoal.tuning.simulation",
        "SimulationOptions": "shoal.tuning.simulation_request",
        "Simulation": "shoal.tuning.simulation",
        "load_run": "shoal.trainer.build",
        "LoadedRun": "shoal.trainer.build",
    },
    "Errors": {
        "ShoalError": "shoal.core.errors",
        "RequestError": "shoal.core.errors",
        "RunError": "shoal.core.errors",
        "Refusal": "shoal.core.errors",
    },
}
_HOMES = {name: home for names in _SUBJECTS.values() for name, home in names.items()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _CallableRoom(types.ModuleType):
    """A room that has the name of an exported function, and can be called as that function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_HOMES[name]), name)(*args, **options)


class _Package(types.ModuleType):
    """A room that is imported becomes an attribute here. ``verify`` would so hide the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, types.ModuleType):
            value.__class__ = _CallableRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
