"""What a run would be, without running it: the plan, every tensor's shape, and the bytes that each rank would hold.

The model is built without memory (on torch's meta device) where it allows that, so a model that does not fit this machine
can still be described on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from shoal.core.plan import Plan
from shoal.core.units import format_bytes, format_count
from shoal.data.spec import UNKNOWN_LENGTH
from shoal.engine.config import Settings
from shoal.engine.parallelize import analyse, example_of, resolve_stages
from shoal.engine.resolve import asks_the_model, schedule_of
from shoal.engine.sizes import RankPreview
from shoal.models.embeddings import make_dense
from shoal.optim.precision import Precision
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.describe import describe
from shoal.paramserver.config import group_plan
from shoal.paramserver.server.memory import sizes_with_servers
from shoal.paramserver.worker.flat import describe_model
from shoal.pipeline.build import RankPart, Stages, prove_stages
from shoal.pipeline.stages import advise_replicas
from shoal.trainer.build import build_parts, build_without_memory
from shoal.trainer.config import Recipe
from shoal.trainer.request import Prepared


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A description of a run that has not started."""

    plan: str
    world_size: int
    steps: int
    global_batch: int
    micro_batch: int
    microbatches: int
    train_samples: int
    run_dir: str
    parameters: int
    shapes: dict[str, list[int]]
    bytes_per_rank: dict[str, int]
    """Of the fullest process."""
    bytes_by_role: dict[str, dict[str, int]]
    """Of the fullest server and the fullest worker; empty without parameter servers."""
    found: list[str]
    """What the plan will do with the model, in words; empty where it does not ask what the model is made of."""


def dry_run_result(prepared: Prepared) -> DryRun:
    """Describe a prepared request."""
    recipe, setup = prepared.recipe, prepared.setup
    model = build_without_memory(recipe.model, prepared.spec).to(
        dtype=Precision.named(recipe.train.precision).weight_dtype
    )
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    plan = setup.plan
    if plan.ps:
        part: dict[str, int] = {}
        lines: list[str] = []
        if plan.ranks_per_replica > 1:
            part, lines = _sizes_of_rank(model, _one_worker(prepared))
        held = sizes_with_servers(
            describe_model(model),
            plan,
            config=recipe.paramserver,
            optim=recipe.optim,
            global_batch=recipe.train.global_batch,
            part=part,
            fixed=_fixed_bytes(model),
        )
        found, by_role = [*held.lines, *lines], held.by_role
        sizes = max(by_role.values(), key=lambda role: role["total"])
    else:
        sizes, found = _sizes_of_rank(model, prepared)
        by_role = {}
    return DryRun(
        plan=str(setup.plan),
        world_size=setup.world_size,
        steps=setup.total_steps,
        global_batch=recipe.train.global_batch,
        micro_batch=setup.micro_batch,
        microbatches=setup.plan.microbatches or 1,
        train_samples=setup.train_samples,
        run_dir=str(prepared.run_dir),
        parameters=num_parameters,
        shapes=shapes,
        # Activations depend on the input and are not counted here.
        bytes_per_rank=sizes,
        bytes_by_role=by_role,
        found=found,
    )


def _fixed_bytes(model: nn.Module) -> int:
    """Of what is saved and not trained: buffers, and parameters that stay as they are."""
    return sum(tensor.nbytes for tensor in model.state_dict(keep_vars=True).values() if not tensor.requires_grad)


def _one_worker(prepared: Prepared) -> Prepared:
    """What one worker does of a run with parameter servers."""
    recipe, setup = prepared.recipe, prepared.setup
    train = recipe.train.model_copy(update={"global_batch": recipe.train.global_batch // setup.plan.num_shares})
    setup = replace(setup, plan=group_plan(setup.plan))
    return replace(prepared, recipe=recipe.model_copy(update={"train": train}), setup=setup)


def _sizes_of_rank(model: nn.Module, prepared: Prepared) -> tuple[dict[str, int], list[str]]:
    """Bytes that the fullest rank keeps; and what was found in the model where the plan asks for it.

    Along ``dp`` and ``tp`` that is the first, which has the largest shards; along ``pp`` it depends on the stages.
    """
    recipe, plan = prepared.recipe, prepared.setup.plan
    analysis, lines = ModuleAnalysis(), []
    parts: list[RankPart | None] = [None]
    versions = [0]
    if asks_the_model(plan):
        whole, _, data = build_parts(recipe, loads=False)
        make_dense(whole)
        analysis = analyse(whole, data, recipe.parallel)
        lines = describe(analysis, plan)
    if plan.pp > 1:
        stages = resolve_stages(whole, data, analysis, plan=plan, settings=recipe.settings)
        lines += stages.describe()
        if recipe.pipeline.network is not None:
            lines.append(
                advise_replicas(
                    whole,
                    stages.units,
                    example_of(data),
                    num_ranks=plan.pp,
                    num_microbatches=plan.microbatches or 1,
                    samples=prepared.setup.micro_batch,
                    config=recipe.pipeline,
                )
            )
        owners = prove_stages(whole, example_of(data), stages)
        parts = [_part_of(stages, owners, rank) for rank in range(plan.pp)]
        versions = [0] * plan.pp
        if stages.schedule.updates.are_asynchronous:
            # The weights themselves are the optimizer's; passes read copies of the versions, which begin to differ with steps.
            versions = list(schedule_of(plan, steps=3).version_bound or versions)
    precision = Precision.named(recipe.train.precision)
    found = []
    for place, (part, num_copies) in enumerate(zip(parts, versions, strict=True)):
        rank = place * (plan.world_size // plan.pp)
        preview = RankPreview.build(model, analysis=analysis, plan=plan, rank=rank, precision=precision, part=part)
        found.append(_sizes_of(preview, recipe.settings, num_copies))
    fullest = max(found, key=lambda sizes: sizes["total"])
    return _with_elastic(fullest, recipe, plan), lines


def _with_elastic(sizes: dict[str, int], recipe: Recipe, plan: Plan) -> dict[str, int]:
    """With what a run that goes on without its dead keeps besides: the state of the view before, while that of the next one is
    built, and under ZeRO the snapshots."""
    if recipe.elastic.mode != "shrink":
        return sizes
    state = sizes["weights"] + sizes["optimizer"]
    if plan.zero and recipe.elastic.copies:
        # Of what only this rank holds: its rows of the weights and the optimizer's state of them. Twice, in turn.
        share = sizes["weights"] if plan.zero == 3 else sizes["weights"] // (plan.dp or 1)
        sizes = {**sizes, "copies": 2 * (share + sizes["optimizer"])}
    sizes = {**sizes, "view change": state}
    del sizes["total"]
    return {**sizes, "total": sum(sizes.values())}


def _part_of(stages: Stages, owners: Mapping[str, tuple[int, ...]], rank: int) -> RankPart:
    """What a rank of a pipeline keeps of the model."""
    names = frozenset(name for name, ranks in owners.items() if rank in ranks)
    return RankPart(elsewhere=stages.elsewhere(rank), names=names)


def _sizes_of(preview: RankPreview, settings: Settings, num_copies: int) -> dict[str, int]:
    """Bytes of a rank by what they are for, and their total; ``num_copies`` are the versions of weights beside the newest."""
    parameters = {id(parameter) for parameter in preview.model.parameters()}
    saved = preview.model.state_dict(keep_vars=True).values()
    # Tables that are not saved are made of the sizes, and not counted as weights.
    buffers = sum(tensor.nbytes for tensor in saved if id(tensor) not in parameters)
    sizes = preview.state_bytes(settings.optim, settings.compression)
    parts = {
        "weights": sizes.weights * (1 + num_copies) + buffers,
        "gradients": sizes.gradients,
        "optimizer": sizes.optimizer,
        "working": sizes.working,
        **({"islands": sizes.islands} if sizes.islands else {}),
    }
    if sizes.compression:
        parts["compression"] = sizes.compression
    return {**parts, "total": sum(parts.values())}


def describe_dry_run(result: DryRun) -> str:
    """The description as people read it."""
    width = max(len(name) for name in result.shapes)
    roles = result.bytes_by_role or {"rank": result.bytes_per_rank}
    sizes = [
        line
        for role, held in roles.items()
        for line in (
            f"bytes per {role}, without activations:",
            *(f"  {name:<{max(10, *map(len, held))}} {format_bytes(count)}" for name, count in held.items()),
        )
    ]
    samples = "an unknown number of" if result.train_samples == UNKNOWN_LENGTH else result.train_samples
    lines = [
        f"plan          {result.plan} on {result.world_size} process(es)",
        f"length        {result.steps} steps of {result.global_batch} samples; {samples} samples to train on",
        f"microbatches  {result.microbatches} of {result.micro_batch} samples per replica and step",
        f"run directory {result.run_dir}",
        f"parameters    {format_count(result.parameters)}",
        *(f"  {name:<{width}}  {tuple(shape)}" for name, shape in result.shapes.items()),
        *result.found,
        *sizes,
        "nothing was started",
    ]
    return "\n".join(lines)
