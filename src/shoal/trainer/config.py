"""The recipe: every section of a run in one value. Sections belong to their rooms; this file only puts them side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import Field

from shoal.checkpoint.config import CheckpointConfig
from shoal.core.config import Config, read_toml, validate
from shoal.core.rundir import Readers
from shoal.data.config import DataConfig
from shoal.elastic.config import ElectionConfig
from shoal.engine.config import Settings, TrainConfig
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

    @property
    def settings(self) -> Settings:
        """The sections that decide what the model computes."""
        return Settings(train=self.train, optim=self.optim, parallel=self.parallel, pipeline=self.pipeline)


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
