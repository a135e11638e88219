"""Events as TensorBoard curves, through tensorboardX: it writes the files without TensorBoard's own 45 MB.

It brings protobuf, so it is an extra (``shoal[tensorboard]``): without it a run that does not ask for curves has none, and one
that asks is refused before it starts.

The library is imported when a sink is made, which happens on the event log's thread: a missing or broken install costs its curves
and nothing else, and no start-up time on the way to the first step.
"""

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    IslandsMeasured,
    Logged,
    MemoryMeasured,
    RateAdapted,
    RoundDone,
    StepDone,
)
from shoal.telemetry.config import LogConfig, TelemetryConfig


def wants_curves(config: TelemetryConfig, log: LogConfig | None = None) -> bool:
    """True when a run writes TensorBoard files.

    Raises:
        RequestError: the recipe asks for them, and the library is not installed; or it asks both for them and for none.
    """
    if config.tensorboard is False:
        if log is not None and "tensorboard" in log.to:
            raise RequestError(
                "log.to names 'tensorboard' and telemetry.tensorboard is false; leave one of the two out"
            )
        return False
    is_installed = importlib.util.find_spec("tensorboardX") is not None
    if config.tensorboard and not is_installed:
        raise RequestError(
            "telemetry.tensorboard is true and the package tensorboardX is not installed; run `pip install "
            "'shoal[tensorboard]'`, or leave the key out"
        )
    return is_installed


def scalars(event: Event) -> dict[str, float]:
    """The curves that an event adds a point to, by tag; empty for events that are no curve."""
    if isinstance(event, StepDone):
        points = {"train/loss": event.loss, "train/lr": event.lr}
        if event.grad_norm is not None:
            points["train/grad_norm"] = event.grad_norm
        points["train/loss_scale"] = event.loss_scale
        points["speed/step_seconds"] = event.seconds
        points["speed/data_seconds"] = event.data_seconds
        if event.seconds > 0:
            points["speed/samples_per_s"] = event.samples / event.seconds
            points["speed/tokens_per_s"] = event.tokens / event.seconds
        return points
    if isinstance(event, Evaluated):
        points = {f"{event.split}/{name}": value for name, value in event.metrics.items()}
        points[f"{event.split}/loss"] = event.loss
        if event.accuracy is not None:
            points[f"{event.split}/accuracy"] = event.accuracy
        return points
    if isinstance(event, RateAdapted):
        found = {"rate_factor": event.rate_factor, "noise_scale": event.noise_scale, "progress": event.progress}
        return {f"adapt/{name}": value for name, value in found.items() if value is not None}
    if isinstance(event, IslandsMeasured | RoundDone) and event.distance is not None:
        return {"islands/distance": event.distance}
    if isinstance(event, Logged):
        return {f"log/{name}": value for name, value in event.values.items()}
    if isinstance(event, MemoryMeasured):
        names = ("weights", "gradient", "optimizer", "other", "rss", "peak_rss")
        return {f"memory/{name}_bytes": float(getattr(event, f"{name}_bytes")) for name in names}
    if isinstance(event, CheckpointSaved):
        return {"checkpoint/stall_seconds": event.stall_seconds, "checkpoint/write_seconds": event.write_seconds}
    return {}


class TensorBoardSink:
    """Writes curves to a folder; a ``Sink`` of the event log."""

    def __init__(self, folder: Path) -> None:
        """Open the folder; each start of a run adds a file to it."""
        writer = importlib.import_module("tensorboardX").SummaryWriter
        self._writer: Any = writer(str(folder), flush_secs=5)

    def write(self, event: Event, wall_time: float) -> None:
        """Add the event's points."""
        step = getattr(event, "step", None)
        for tag, value in scalars(event).items():
            # tensorboardX logs a complaint for each NaN; the event file has it, and a curve cannot show it.
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, step, walltime=wall_time)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
