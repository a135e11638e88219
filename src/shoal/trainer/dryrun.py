"""What a run would be, without running it: the plan, every tensor's shape, and the bytes that each rank would hold.

The model is built without memory (on torch's meta device) where it allows that, so a model that does not fit this machine
can still be described on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes, format_count
from shoal.models.build import build_model
from shoal.optim.build import build_optimizer, initialise_state
from shoal.optim.precision import Precision
from shoal.trainer.request import Prepared
from shoal.trainer.state import named_weights


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


def dry_run_result(prepared: Prepared) -> DryRun:
    """Describe a prepared request."""
    recipe, layout = prepared.recipe, prepared.layout
    model = _build_without_memory(prepared).to(dtype=Precision.named(recipe.train.precision).weight_dtype)
    optimizer = build_optimizer(recipe.optim, model)
    initialise_state(optimizer)
    weights = _count_bytes(named_weights(model).values())
    gradients = _count_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    state = _count_bytes(tensor for values in optimizer.state.values() for tensor in values.values())
    return DryRun(
        plan=str(layout.plan),
        world_size=layout.world_size,
        steps=prepared.total_steps,
        global_batch=recipe.train.global_batch,
        micro_batch=layout.micro_batch,
        microbatches=layout.plan.microbatches or 1,
        train_samples=prepared.train_samples,
        run_dir=str(prepared.run_dir),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shapes={name: list(parameter.shape) for name, parameter in model.named_parameters()},
        # Data parallelism holds all of it on every rank; activations depend on the input and are not counted here.
        bytes_per_rank={
            "weights": weights,
            "gradients": gradients,
            "optimizer": state,
            "total": weights + gradients + state,
        },
    )


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
        "bytes per rank, without activations:",
        *(f"  {name:<10} {size}" for name, size in sizes.items()),
        "nothing was started",
    ]
    return "\n".join(lines)
