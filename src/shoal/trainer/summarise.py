"""The numbers that a run ends with, gathered from all ranks."""

from typing import Any

import torch

from shoal.telemetry.memory import peak_rss_bytes
from shoal.trainer.loop import Trainer
from shoal.trainer.profiler import RunProfiler


def summarise(trainer: Trainer, *, wall_seconds: float, profiler: RunProfiler | None = None) -> dict[str, Any]:
    """The summary of a run that ended in an orderly way. All ranks call it together; each gets the same answer."""
    seen = {} if profiler is None else {"forecast": {"measured": profiler.measured()}}
    progress = trainer.progress
    peak = torch.tensor([peak_rss_bytes()], dtype=torch.int64, device=trainer.world.device)
    peaks = [int(tensor) for tensor in trainer.world.all_gather(peak)]
    seconds = progress.trained_seconds
    return {
        "status": trainer.status,
        "stopped_by": trainer.stopped_by,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "rollbacks": progress.recovery.rollbacks,
        "first_loss": progress.first_loss,
        "final_loss": progress.last_loss,
        "validation_loss": progress.validation_loss,
        "validation_accuracy": progress.validation_accuracy,
        "baseline_loss": trainer.data.spec.baseline_loss,
        "tokens_per_s": progress.tokens / seconds if seconds > 0 else 0.0,
        "samples_per_s": progress.tokens / trainer.data.spec.tokens_per_sample / seconds if seconds > 0 else 0.0,
        "wall_s": wall_seconds,
        "world_size": trainer.world.size,
        "plan": str(trainer.plan),
        "peak_rss_bytes": peaks,
        "weights_sha256": trainer.hash_weights(),
        "checkpoint_error": trainer.persistence.failure,
        **seen,
    }
