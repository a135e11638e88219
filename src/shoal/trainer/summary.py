"""The summary of a run: the numbers that ``summary.json`` promises, gathered from all ranks and written by the first."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from shoal.core.rundir import RunDir
from shoal.telemetry.memory import peak_rss_bytes
from shoal.trainer.loop import Trainer
from shoal.trainer.state import hash_weights


def summarise(trainer: Trainer, *, wall_seconds: float) -> dict[str, Any]:
    """The summary of a run that ended in an orderly way. All ranks call it together; each gets the same answer."""
    progress = trainer.progress
    peak = torch.tensor([peak_rss_bytes()], dtype=torch.int64, device=trainer.world.device)
    peaks = [int(tensor) for tensor in trainer.world.gather(peak)]
    seconds = progress.trained_seconds
    return {
        "status": trainer.status,
        "stopped_by": trainer.stopped_by,
        "steps": progress.step,
        "first_loss": progress.first_loss,
        "final_loss": progress.last_loss,
        "validation_loss": progress.validation_loss,
        "baseline_loss": trainer.data.spec.baseline_loss,
        "tokens_per_s": progress.tokens / seconds if seconds > 0 else 0.0,
        "wall_s": wall_seconds,
        "world_size": trainer.world.size,
        "plan": str(trainer.plan),
        "peak_rss_bytes": peaks,
        "weights_sha256": hash_weights(trainer.model),
        "checkpoint_error": trainer.persistence.failure,
    }


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Replace ``summary.json`` in one piece: a reader sees the old one or the new one."""
    target = RunDir(run_dir).summary
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(beside, target)


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run directory, or None when it has none yet."""
    try:
        text = RunDir(run_dir).summary.read_text()
    except FileNotFoundError:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def summarise_death(
    *,
    status: str,
    plan: str,
    world_size: int,
    step: int,
    cause: str,
    wall_seconds: float,
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """The summary of a run that did not end in an orderly way: what is known, and null for what only the living could say."""
    known = before or {}
    return {
        "status": status,
        "stopped_by": cause,
        "steps": step,
        "first_loss": known.get("first_loss"),
        "final_loss": None,
        "validation_loss": None,
        "baseline_loss": known.get("baseline_loss"),
        "tokens_per_s": None,
        "wall_s": wall_seconds,
        "world_size": world_size,
        "plan": plan,
        "peak_rss_bytes": [],
        "weights_sha256": None,
        "checkpoint_error": None,
    }
