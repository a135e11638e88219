"""The ``[telemetry]`` section of a recipe: what a run shows of itself, and how often."""

from typing import Literal

from pydantic import Field, field_validator

from shoal.core.config import Config


class TelemetryConfig(Config):
    """What a run shows of itself. Events as JSONL are always written."""

    tensorboard: bool | None = None
    """Write TensorBoard files to ``tensorboard/`` in the run directory; left out, where tensorboardX is installed."""
    profile: str | None = None
    """Steps to trace, such as "10:20" for steps 10 to 19; the traces open in Perfetto."""
    progress_every: float = Field(default=5.0, gt=0)
    """Seconds between progress lines where the output is not a terminal."""
    memory_every: int = Field(default=100, ge=0)
    """Steps between measurements of where memory is, and of what has crossed between ranks; 0 measures never."""
    spans_every: int = Field(default=100, ge=0)
    """Steps between those of which every phase, collective and pipeline cell is recorded, and the second; 0 records none."""
    live_seconds: float = Field(default=1.0, ge=0)
    """Seconds between writings of `live.json`, in which a run says where each rank is; 0 writes none."""

    @field_validator("profile")
    @classmethod
    def _is_window(cls, text: str | None) -> str | None:
        if text is not None:
            parse_window(text)
        return text


LoggerName = Literal["tensorboard", "mlflow", "wandb"]


class LogConfig(Config):
    """Other programs that a run's numbers go to, besides its own events."""

    to: tuple[LoggerName, ...] = ()
    """Which: tensorboard, mlflow, wandb; each but the first needs its extra, such as shoal[mlflow]."""
    project: str = "shoal"
    """What the run belongs to: MLflow's experiment, the project of Weights & Biases."""
    name: str | None = None
    """What the run is called there; the name of its run directory when left out."""
    mlflow_uri: str | None = None
    """Where MLflow keeps runs; MLFLOW_TRACKING_URI when left out, and without that the folder mlflow of the run directory."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Whether Weights & Biases may use the network; offline files lie in the run directory, for `wandb sync`."""


def parse_window(text: str) -> tuple[int, int]:
    """``"10:20"`` -> the steps 10 to 19 as ``(10, 20)``; the first step of a run is step 1.

    Raises:
        ValueError: the text is not two step numbers, the first at least 1 and below the second.
    """
    first, colon, end = text.partition(":")
    if not (colon and first.strip().isdecimal() and end.strip().isdecimal()):
        raise ValueError(f"{text!r} is not a range of steps; write first:end, such as 10:20 for steps 10 to 19")
    window = int(first), int(end)
    if not 1 <= window[0] < window[1]:
        raise ValueError(f"steps {text} are none; the first must be at least 1 and below the end, such as 10:20")
    return window
