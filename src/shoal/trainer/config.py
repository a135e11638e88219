"""The recipe: every section of a run in one value. Sections belong to their rooms; this file only puts them side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import Field, field_validator, model_validator

from shoal.checkpoint.config import CheckpointConfig
from shoal.core.config import Config, read_toml, validate
from shoal.core.errors import RequestError
from shoal.core.rundir import Readers
from shoal.core.units import parse_duration
from shoal.data.config import DataConfig
from shoal.elastic.config import ElectionConfig
from shoal.launch.config import ProcessConfig
from shoal.models.config import ModelConfig
from shoal.optim.config import OptimConfig
from shoal.parallel.analysis.config import ParallelConfig
from shoal.paramserver.config import ParamServerConfig
from shoal.pipeline.config import PipelineConfig
from shoal.planner.config import PlannerConfig
from shoal.telemetry.config import TelemetryConfig


class ElasticConfig(ElectionConfig, ProcessConfig):
    """The ``[elastic]`` section: how long to wait for a rank, how often to start again, and how to be let in by etcd."""


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


class EvalConfig(Config):
    """When and on how much to evaluate."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations on the validation split; 0 evaluates at the end only."""
    samples: int = Field(default=2048, ge=0)
    """Samples of the split to use, its first ones; 0 takes the whole split."""
    batch: int | None = Field(default=None, ge=1)
    """Samples per forward pass while evaluating; the training microbatch when left out."""


class RunConfig(Config):
    """The run directory."""

    readable_by: Readers = "owner"
    """Who may read the run directory that is made, and every file in it: owner, group, or all (as far as your umask allows)."""


class Recipe(Config):
    """A whole run: everything that decides what it computes and what it leaves behind."""

    plan: str = "dp=1"
    """How the run is laid out over processes, such as "dp=2"."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    train: TrainConfig
    """Length, batch and arithmetic."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning rate."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during training."""
    run: RunConfig = RunConfig()
    """The run directory."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and which are kept."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What a run records about itself."""
    parallel: ParallelConfig = ParallelConfig()
    """What the plan is to find in the model, where it would find it otherwise."""
    pipeline: PipelineConfig = PipelineConfig()
    """Where a pipeline cuts the model, where Shoal would cut it otherwise."""
    paramserver: ParamServerConfig = ParamServerConfig()
    """Parameter servers, beyond what the plan says."""
    planner: PlannerConfig = PlannerConfig()
    """What plans are searched for, where that is not the recipe's module on a known device."""
    elastic: ElasticConfig = ElasticConfig()
    """Deadlines and restarts."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with ``section.key=value`` overrides applied.

    Raises:
        RequestError: names every wrong key with the nearest right one.
    """
    return validate(Recipe, read_toml(path), origin=path.name, overrides=overrides)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML with every default filled in; what is unset is left out, because TOML has no null."""
    return tomlkit.dumps(_without_none(recipe.model_dump(mode="json")))


def with_plan(text: str, plan: str) -> str:
    """The text of a recipe with another plan; its comments, order and line ends stay."""
    document = tomlkit.parse(text)
    if "plan" in document:
        document["plan"] = plan
        return tomlkit.dumps(document)
    # At the top, where no comment about a section comes to stand before it.
    line_end = "\r\n" if "\r\n" in text else "\n"
    return f"plan = {tomlkit.item(plan).as_string()}{line_end}{text}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
