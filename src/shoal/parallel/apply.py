"""The techniques that lay a model out over ranks, in the order in which they are applied. This page is the list.

Order matters: what replaces modules comes before what compiles them, and what wraps the whole comes last, because it must
see every parameter in its final place.
"""

import torch
import torch.distributed as dist
from torch import nn

from shoal.parallel.batchnorm import apply_batchnorm
from shoal.parallel.data import apply_data_parallel


def apply_to_model(model: nn.Module, *, group: dist.ProcessGroup | None, batch_norm: str) -> None:
    """Change a model in place so that it computes under a plan what it computes alone."""
    # 1. Batch norm: running statistics that are the same on every replica, in one process too.
    apply_batchnorm(model, group=group, mode=batch_norm)


def apply_to_objective(
    objective: nn.Module,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    compile_model: bool,
    unused_parameters: bool,
) -> nn.Module:
    """Wrap the model and its loss so that a backward pass leaves the reduced gradient behind."""
    # 2. Compilation, inside the data-parallel wrapper: its hooks must stay outside the compiled graph.
    if compile_model:
        model = objective.get_submodule("model")
        model.compile()
    # 3. Data parallelism.
    if group is not None and dist.get_world_size(group) > 1:
        return apply_data_parallel(objective, group=group, device=device, unused_parameters=unused_parameters)
    return objective
