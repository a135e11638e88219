"""The recipe: every section of a run in one value, and its help, printed from the recipe itself.

Sections belong to their rooms; this file only puts them side by side. The help is TOML: saved to a file it sets every default.
What has no default, a table that is not there unless it is written, and the other choices of a section are comments in it.
"""

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomlkit
from pydantic import BaseModel, Field, Tag, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal.checkpoint.config import CheckpointConfig
from shoal.compression.config import CompressionConfig
from shoal.core.config import Config, read_toml, validate
from shoal.core.errors import RequestError, did_you_mean
from shoal.core.rundir import Readers
from shoal.data.config import DataConfig
from shoal.elastic.config import ElectionConfig, GroupConfig
from shoal.engine.callback_config import SHIPPED, CallbackConfig, is_own, is_shipped, metric_name
from shoal.engine.config import Settings, TrainConfig
from shoal.launch.config import ProcessConfig
from shoal.models.config import ModelConfig
from shoal.optim.config import OptimConfig
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.paramserver.config import ParamServerConfig
from shoal.pipeline.config import PipelineConfig
from shoal.planner.config import PlannerConfig
from shoal.replicas.config import ReplicaConfig
from shoal.telemetry.config import LogConfig, TelemetryConfig
from shoal.trainer.online.config import PublishConfig


class ElasticConfig(ElectionConfig, GroupConfig, ProcessConfig):
    """The ``[elastic]`` section: how long to wait for a rank, what to do when one dies, and how to be let in by etcd."""


class EvalConfig(Config):
    """When and on how much to evaluate."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations on the validation split; 0 evaluates at the end only."""
    samples: int = Field(default=2048, ge=0)
    """Samples of the split to use, its first ones; 0 takes the whole split."""
    batch: int | None = Field(default=None, ge=1)
    """Samples per forward pass while evaluating; the training microbatch when left out."""
    metrics: tuple[str, ...] = ()
    """Metrics besides the loss: accuracy, topK such as top5, perplexity, f1, mae, rmse, or your own as module:function."""

    @field_validator("metrics")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for place, name in enumerate(names):
            if not (is_shipped(name) or is_own(name)):
                raise ValueError(
                    f"there is no metric {name!r}, and your own is named as module:function; "
                    f"{did_you_mean(name, [*SHIPPED, 'top5'])}"
                )
            if metric_name(name) in map(metric_name, names[:place]):
                raise ValueError(f"two metrics are called {metric_name(name)!r}; leave one out, or rename it")
        return names


class RunConfig(Config):
    """The run directory."""

    readable_by: Readers = "owner"
    """Who may read the run directory that is made, and every file in it: owner, group, or all (as far as your umask allows)."""


class Recipe(Config):
    """A whole run: everything that decides what it computes and what it leaves behind."""

    plan: str = "dp=1"
    """How the run is laid out over processes, such as "dp=2"."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Code that is called between steps: names, tables with a name and its settings, or your own as module:function."""
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
    publish: PublishConfig = PublishConfig()
    """When the model is published for predictions while the run trains."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What a run records about itself."""
    parallel: ParallelConfig = ParallelConfig()
    """What the plan is to find in the model, where it would find it otherwise."""
    pipeline: PipelineConfig = PipelineConfig()
    """Where a pipeline cuts the model, where Shoal would cut it otherwise."""
    paramserver: ParamServerConfig = ParamServerConfig()
    """Parameter servers, beyond what the plan says."""
    replicas: ReplicaConfig = ReplicaConfig()
    """How islands agree, beyond what the plan's sync says."""
    compression: CompressionConfig = CompressionConfig()
    """How what the plan's compress names is done."""
    planner: PlannerConfig = PlannerConfig()
    """What plans are searched for, where that is not the recipe's module on a known device."""
    elastic: ElasticConfig = ElasticConfig()
    """Deadlines and restarts."""
    log: LogConfig = LogConfig()
    """Other programs that a run's numbers go to."""

    @property
    def settings(self) -> Settings:
        """The sections that decide what the model computes."""
        return Settings(
            train=self.train,
            optim=self.optim,
            parallel=self.parallel,
            pipeline=self.pipeline,
            replicas=self.replicas,
            compression=self.compression,
        )


def load_recipe(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with ``section.key=value`` overrides applied.

    Args:
        path: of the file.
        overrides: what ``--set`` has on the command line.

    Raises:
        RequestError: names every wrong key with the nearest right one.
    """
    return validate(Recipe, read_toml(Path(path)), origin=Path(path).name, overrides=overrides)


def read_start_deadline(path: str | PathLike[str], overrides: Sequence[str] = ()) -> float:
    """How many seconds the processes of a launcher wait for each other: ``elastic.start_deadline``.

    A recipe that is wrong is refused by the first of them, when they have met: until then the default counts.
    """
    try:
        return load_recipe(path, overrides).elastic.start_deadline
    except RequestError:
        return ProcessConfig().start_deadline


RecipeLike = Recipe | Mapping[str, Any] | str | PathLike[str]
"""What functions of the library take for a recipe: the path of a TOML file, the tables of one as a dict, or a ``Recipe``."""


def read_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that somebody gives in any of its forms, with ``section.key=value`` overrides applied.

    Raises:
        RequestError: names every wrong key with the nearest right one.
    """
    if isinstance(recipe, str | PathLike):
        return load_recipe(Path(recipe), overrides)
    if isinstance(recipe, Recipe):
        # What is unset stays unset: an override may choose another form of a section.
        return recipe if not overrides else validate(Recipe, _tables_of(recipe), origin=IN_CODE, overrides=overrides)
    return validate(Recipe, recipe, origin=IN_CODE, overrides=overrides)


def name_recipe(recipe: RecipeLike) -> str:
    """What to call a recipe: its path, or that it has none."""
    return str(recipe) if isinstance(recipe, str | PathLike) else IN_CODE


IN_CODE = "the recipe given in code"


def _tables_of(recipe: Recipe) -> dict[str, Any]:
    found = _without_none(recipe.model_dump(mode="json"))
    assert isinstance(found, dict)
    return found


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
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


_REQUIRED = "(required)"
_UNSET = "(unset)"


def describe_recipe() -> str:
    """Every section and key of a recipe, as TOML with comments."""
    lines = list(_describe_fields(Recipe))
    for name, field in Recipe.model_fields.items():
        for place, (choice, section) in enumerate(_sections(field)):
            title = f"[{name}]" if choice is None else f"[{name}]  # {choice}"
            described = [title, *_describe_fields(section)]
            lines += ["", *(described if place == 0 else _commented(described)), *_describe_tables(name, section)]
        for choice, table in _listed(field.annotation):
            lines += ["", *_commented([f"[[{name}]]  # {choice}", *_describe_fields(table)])]
    return "\n".join(lines)


def _commented(lines: Iterable[str]) -> list[str]:
    return [line if not line or line.startswith("#") else f"# {line}" for line in lines]


def _describe_tables(path: str, section: type[BaseModel]) -> Iterator[str]:
    """The tables inside a section, each under its whole name and with what it is for."""
    for name, field in section.model_fields.items():
        for suffix, table in _tables(field):
            inner = f"{path}.{name}{suffix}"
            title = f"[[{inner}]]" if get_origin(field.annotation) is tuple else f"[{inner}]"
            yield from ("", *_commented([f"{title}  # {_help_text(field)}", *_describe_fields(table)]))
            yield from _describe_tables(inner, table)
        for choice, table in _listed(field.annotation):
            yield from ("", *_commented([f"[[{path}.{name}]]  # {choice}", *_describe_fields(table)]))


def _describe_fields(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if _sections(field) or _tables(field):
            continue
        default = _default_text(field)
        line = f"{name} = {default}    # {_type_text(field.annotation)}: {_help_text(field)}"
        yield f"# {line}" if default in (_REQUIRED, _UNSET) else line


def _sections(field: FieldInfo) -> list[tuple[str | None, type[BaseModel]]]:
    """The sections that a field of the recipe can hold, each with the choice that selects it."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(None, annotation)]
    found: list[tuple[str | None, type[BaseModel]]] = []
    for option in get_args(annotation):
        if get_origin(option) is Annotated:
            member, *marks = get_args(option)
            found += [(mark.tag, member) for mark in marks if isinstance(mark, Tag)]
    return found


def _listed(annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """The tagged tables that a list can hold, each with the choice that selects it."""
    if get_origin(annotation) is not tuple:
        return []
    options = [get_args(annotation)[0]]
    found: list[tuple[str, type[BaseModel]]] = []
    while options:
        option = options.pop(0)
        tags = [mark.tag for mark in get_args(option)[1:] if isinstance(mark, Tag)]
        if tags:
            found.append((tags[0], get_args(option)[0]))
        elif get_origin(option) in (Annotated, Union, types.UnionType):
            options += get_args(option)[:1] if get_origin(option) is Annotated else get_args(option)
    return found


def _tables(field: FieldInfo) -> list[tuple[str, type[BaseModel]]]:
    """The tables that a field of a section can hold, each with the end of its name: in a table of tables the user chooses it."""
    annotation = field.annotation
    suffix = ""
    if get_origin(annotation) is dict:
        annotation, suffix = get_args(annotation)[1], ".NAME"
    elif get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return [(suffix, option) for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _help_text(field: FieldInfo) -> str:
    """The docstring of a field on one line."""
    return " ".join((field.description or "").split())


def _default_text(field: FieldInfo) -> str:
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return _REQUIRED
    if default is None:
        return _UNSET
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return json.dumps(default)
    if isinstance(default, tuple):
        return json.dumps(list(default))
    return str(default)


def _type_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_text(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        options = [_type_text(option) for option in get_args(annotation) if option is not type(None)]
        return " | ".join(dict.fromkeys(options))
    if origin in (tuple, list):
        return f"list of {_type_text(get_args(annotation)[0])}"
    if origin is dict:
        return f"table of {_type_text(get_args(annotation)[1])}"
    if origin is not None:
        return str(annotation).replace("typing.", "")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return str(getattr(annotation, "__name__", annotation))
