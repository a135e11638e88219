"""Shoal trains PyTorch models across processes: the same module, the same numbers, on one or on many.

``Trainer`` and what a script needs beside it are importable from here, and are imported when they are first used: ``import
shoal`` alone must stay quick, and must not import torch.
"""

import importlib
from typing import Any

_HOMES = {
    "CheckpointConfig": "shoal.checkpoint.config",
    "ElasticConfig": "shoal.trainer.config",
    "EvalConfig": "shoal.trainer.config",
    "Hook": "shoal.engine.hooks",
    "OptimConfig": "shoal.optim.config",
    "ParallelConfig": "shoal.parallel.analysis.structure",
    "PipelineConfig": "shoal.pipeline.config",
    "Plan": "shoal.core.plan",
    "TelemetryConfig": "shoal.telemetry.config",
    "TrainConfig": "shoal.engine.config",
    "Trainer": "shoal.trainer.loop",
    "from_datasets": "shoal.data.sources.own",
}

__all__ = [
    "CheckpointConfig",
    "ElasticConfig",
    "EvalConfig",
    "Hook",
    "OptimConfig",
    "ParallelConfig",
    "PipelineConfig",
    "Plan",
    "TelemetryConfig",
    "TrainConfig",
    "Trainer",
    "from_datasets",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
