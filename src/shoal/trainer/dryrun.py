"""What a run would be, without running it: the plan, every tensor's shape, and the bytes that each rank would hold.

The model is built without memory (on torch's meta device) where it allows that, so a model that does not fit this machine
can still be described on it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.units import format_bytes, format_count
from shoal.models.build import build_model
from shoal.optim.precision import Precision
from shoal.parallel.anatomy import Anatomy
from shoal.parallel.describe import describe
from shoal.parallel.sizes import predict_sizes
from shoal.parallel.tensor.apply import apply_tensor_parallel
from shoal.trainer.build import build_parts
from shoal.trainer.laying import look_at
from shoal.trainer.layout import asks_the_model
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
    found: list[str]
    """What the plan will do with the model, in words; empty where it does not ask what the model is made of."""


def dry_run_result(prepared: Prepared) -> DryRun:
    """Describe a prepared request."""
    recipe, layout = prepared.recipe, prepared.layout
    model = _build_without_memory(prepared).to(dtype=Precision.named(recipe.train.precision).weight_dtype)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes, found = _sizes_of_rank(model, prepared)
    return DryRun(
        plan=str(layout.plan),
        world_size=layout.world_size,
        steps=prepared.total_steps,
        global_batch=recipe.train.global_batch,
        micro_batch=layout.micro_batch,
        microbatches=layout.plan.microbatches or 1,
        train_samples=prepared.train_samples,
        run_dir=str(prepared.run_dir),
        parameters=num_parameters,
        shapes=shapes,
        # Activations depend on the input and are not counted here.
        bytes_per_rank=sizes,
        found=found,
    )


def _sizes_of_rank(model: nn.Module, prepared: Prepared) -> tuple[dict[str, int], list[str]]:
    """Bytes that rank 0, which has the largest shards, keeps; and what was found in the model where the plan asks for it."""
    recipe, plan = prepared.recipe, prepared.layout.plan
    anatomy, lines = Anatomy(), []
    parameters = {id(parameter) for parameter in model.parameters()}
    saved = model.state_dict(keep_vars=True).values()
    # Tables that are not saved are made of the sizes, and not counted as weights.
    buffers = sum(tensor.nbytes for tensor in saved if id(tensor) not in parameters)
    if asks_the_model(plan):
        whole, _, data = build_parts(recipe)
        anatomy = look_at(whole, data, recipe.parallel)
        lines = describe(anatomy, plan)
    mesh = pretend_mesh(plan)
    if mesh.has(Axis.TENSOR):
        apply_tensor_parallel(model, anatomy=anatomy, mesh=mesh, sequence_parallel=plan.sp)
    sizes = predict_sizes(
        model,
        anatomy=anatomy,
        stage=plan.zero,
        num_data_ranks=mesh.degree(Axis.DATA),
        data_rank=0,
        num_microbatches=plan.microbatches or 1,
        optimizer=recipe.optim.name,
    )
    parts = {
        "weights": sizes.weights + buffers,
        "gradients": sizes.gradients,
        "optimizer": sizes.optimizer,
        "working": sizes.working,
    }
    return {**parts, "total": sum(parts.values())}, lines


def _build_without_memory(prepared: Prepared) -> nn.Module:
    recipe, spec = prepared.recipe, prepared.spec
    try:
        with torch.device("meta"):
            return build_model(recipe.model, spec)
    except (NotImplementedError, RuntimeError):
        # The user's own build may compute on its weights, which the meta device cannot.
        return build_model(recipe.model, spec)
    except TypeError as error:
        raise RequestError(f"the model cannot be built: {error}") from error


def describe_dry_run(result: DryRun) -> str:
    """The description as people read it."""
    width = max(len(name) for name in result.shapes)
    sizes: dict[str, Any] = {name: format_bytes(count) for name, count in result.bytes_per_rank.items()}
    lines = [
        f"plan          {result.plan} on {result.world_size} process(es)",
        f"length        {result.steps} steps of {result.global_batch} samples; {result.train_samples} samples to train on",
        f"microbatches  {result.microbatches} of {result.micro_batch} samples per replica and step",
        f"run directory {result.run_dir}",
        f"parameters    {format_count(result.parameters)}",
        *(f"  {name:<{width}}  {tuple(shape)}" for name, shape in result.shapes.items()),
        *result.found,
        "bytes per rank, without activations:",
        *(f"  {name:<10} {size}" for name, size in sizes.items()),
        "nothing was started",
    ]
    return "\n".join(lines)
