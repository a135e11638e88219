"""The ``[train]`` section of a recipe, and the settings that a parallel model is built by."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shoal.compression.config import CompressionConfig
from shoal.core.config import Config
from shoal.core.errors import RequestError
from shoal.core.units import parse_duration
from shoal.engine.callback_config import EarlyStopConfig
from shoal.optim.config import OptimConfig
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.pipeline.config import PipelineConfig
from shoal.replicas.config import ReplicaConfig


class TrainConfig(Config):
    """How long to train, on how much at once, and in which arithmetic."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps to take; give one of steps, epochs and tokens."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training split to make, in place of steps; rounded up to whole steps."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens to train on (samples, where a sample is not a sequence), in place of steps; rounded up to whole steps."""
    global_batch: int = Field(default=32, ge=1)
    """Samples per step over all replicas."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Samples per forward pass; the replica's share of a step is worked off in as many passes as that takes."""
    seed: int = Field(default=1, ge=0)
    """Decides initial weights, sample order and dropout, the same on any number of processes."""
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Arithmetic of the forward and backward pass; the 16-bit ones keep float32 weights, float16 scales its loss."""
    compile: bool = False
    """Run the model through torch.compile."""
    time_limit: str | None = None
    """Stop in an orderly way, with a checkpoint, after this long: 90s, 10m, 1h30m."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does: stop the run, or skip the step on all ranks alike."""
    spike: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Leave out a step, on all ranks alike, whose loss is above this many times the median of the last 16; left out, none is."""
    rollback_after: int = Field(default=0, ge=0)
    """Steps left out in a row (spike, nonfinite) after which the run goes back to its last good checkpoint; 0 never goes back."""
    rollback_rate: float = Field(default=0.5, gt=0, le=1)
    """What going back multiplies the learning rate by, from there to the end."""
    batch_norm: Literal["local", "sync"] = "local"
    """Statistics that batch norm normalises by: each microbatch's own, or those of all replicas together."""
    unused_parameters: bool = False
    """Allow parameters that a step does not touch; data parallelism then looks for them at every step."""
    watch_every: int = Field(default=100, ge=0)
    """Steps between comparisons of what replicas must hold alike (before a save too); a difference stops the run; 0 is off."""
    early_stop: EarlyStopConfig | None = None
    """End training when a metric of the validation split no longer gets better."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads per process; derived from the cores and the number of processes when left out."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        given = [name for name in ("steps", "epochs", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of steps, epochs and tokens as the length (found {found})")
        if self.rollback_after and self.spike is None and self.nonfinite == "stop":
            raise ValueError(
                f"rollback_after {self.rollback_after} counts steps that are left out, and none ever is; set spike, such as "
                "10, or nonfinite to skip"
            )
        return self

    @field_validator("time_limit")
    @classmethod
    def _is_a_duration(cls, text: str | None) -> str | None:
        try:
            if text is not None:
                parse_duration(text)
        except RequestError as error:
            raise ValueError(str(error)) from error
        return text


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sections of a recipe that decide what a parallel model computes."""

    train: TrainConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)

    @classmethod
    def of(
        cls,
        train: TrainConfig,
        optim: OptimConfig | None = None,
        parallel: ParallelConfig | None = None,
        pipeline: PipelineConfig | None = None,
        replicas: ReplicaConfig | None = None,
        compression: CompressionConfig | None = None,
    ) -> "Settings":
        """The settings, with the defaults of every section that is left out."""
        return cls(
            train=train,
            optim=optim or OptimConfig(),
            parallel=parallel or ParallelConfig(),
            pipeline=pipeline or PipelineConfig(),
            replicas=replicas or ReplicaConfig(),
            compression=compression or CompressionConfig(),
        )

    def describe(self) -> dict[str, Any]:
        """What is set of the length, the batch, the arithmetic and the optimizer, by ``section.key``; for loggers."""
        sections = {"train": self.train, "optim": self.optim}
        found = {
            f"{name}.{key}": value
            for name, section in sections.items()
            for key, value in section.model_dump(mode="json").items()
        }
        return {key: value for key, value in found.items() if isinstance(value, bool | int | float | str)}
