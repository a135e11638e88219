"""Builds the optimizer of a run, with its state, from the ``[optim]`` section, and names its state for checkpoints.

torch's own optimizers are used in their fused form, which runs the same kernel for every tensor whatever else is stepped with it.
What that kernel promises about shards is in ``flat.CUT_MULTIPLE``. LARS and LAMB are ours, because torch has neither. Any other
class of torch is named by the recipe (``optim/torchclass.py``).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shoal.core.errors import RequestError, RunError
from shoal.optim.config import OptimConfig
from shoal.optim.flat import CUT_MULTIPLE as CUT_MULTIPLE
from shoal.optim.flat import FlatState, flat_sizes, is_flat
from shoal.optim.groups import Groups, trainable
from shoal.optim.groups import decide_groups as decide_groups
from shoal.optim.groups import freeze as freeze
from shoal.optim.groups import set_rate as set_rate
from shoal.optim.layerwise import Lamb, Lars, Norms
from shoal.optim.torchclass import build_named, early_state, holding_of

_DEFAULT_EPS = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10, "lamb": 1e-6}
# Tensors of the parameter's shape that each keeps, and whether it counts its steps.
_HOLDS = {
    "sgd": (0, False),
    "momentum": (1, False),
    "nesterov": (1, False),
    "lars": (1, False),
    "adagrad": (1, True),
    "adam": (2, True),
    "adamw": (2, True),
    "lamb": (2, True),
}
_COUNT_BYTES = 4  # torch counts steps in float32


def build_optimizer(
    config: OptimConfig,
    model: nn.Module,
    updated: Mapping[str, nn.Parameter] | None = None,
    norms: Norms | None = None,
    groups: Groups | None = None,
) -> Optimizer:
    """The optimizer over the model's trainable parameters: a decayed and an exempt group, each in the order of names.

    Args:
        config: the ``[optim]`` section.
        model: decides which parameters are in which group, by their names, dims and modules.
        updated: the tensors that this rank updates in their place, by parameter name (ZeRO: some rows of some parameters); names
            that are absent belong to other ranks, and a rank may have none at all.
        norms: how LARS and LAMB get the norms of whole tensors when a rank holds parts of them.
        groups: of the whole model, where this one is a part of it (``decide_groups``).

    Raises:
        RequestError: the model has nothing to train, or a parameter whose memory has gaps.
    """
    tensors = trainable(model) if updated is None else sorted(updated.items())
    for name, tensor in tensors:
        refuse_gaps(name, tensor)
    groups = decide_groups(config, model) if groups is None else groups
    param_groups = groups.params(tensors, is_layerwise=config.name in ("lars", "lamb"))
    eps = config.eps if config.eps is not None else _DEFAULT_EPS.get(config.name, 0.0)
    # Each group carries its own weight decay; what is given here is only the default of groups added later.
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    match config.name:
        case "sgd":
            return SGD(param_groups, **common, fused=True)
        case "momentum" | "nesterov":
            return SGD(param_groups, **common, momentum=config.momentum, nesterov=config.name == "nesterov", fused=True)
        case "adam":
            return Adam(param_groups, **common, betas=config.betas, eps=eps, fused=True)
        case "adamw":
            return AdamW(param_groups, **common, betas=config.betas, eps=eps, fused=True)
        case "adagrad":
            return Adagrad(param_groups, **common, eps=eps, fused=True)
        case "lars":
            return Lars(param_groups, **common, momentum=config.momentum, trust=config.trust, norms=norms)
        case "lamb":
            return Lamb(param_groups, **common, betas=config.betas, eps=eps, norms=norms)
        case _:
            return build_named(config, param_groups)


def initialise_state(optimizer: Optimizer) -> None:
    """Make the state of every parameter exist before the first step, as torch begins it, in one buffer per kind of state.

    The first step is the same with and without it, at the rate that the optimizer was built with. State that is there already
    keeps its values.
    """
    members = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if all(optimizer.state[parameter] for _, parameter in members) and is_flat(optimizer):
        return
    flat = FlatState(optimizer)
    for group, parameter in members:
        state = optimizer.state[parameter] or _zero_state(optimizer, group, parameter)
        optimizer.state[parameter] = flat.move(parameter, state)


@torch.no_grad()
def reset_state(optimizer: Optimizer) -> None:
    """Put the state of every parameter back to its beginning, in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = optimizer.state.pop(parameter, {})
            fresh = dict(_zero_state(optimizer, group, parameter))
            for key, value in held.items():
                if isinstance(value, Tensor) and key in fresh:
                    value.copy_(fresh[key])
            optimizer.state[parameter] = held


def _zero_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, Lars | Lamb):
        return optimizer.create_state(parameter)
    return early_state(optimizer, group, parameter)


def num_state_bytes(config: OptimConfig, numels: list[int], itemsize: int) -> int:
    """Bytes of the state that an optimizer keeps for tensors of these sizes, with the padding between them.

    Raises:
        RequestError: it names a class of torch that cannot be used.
    """
    size, count = flat_sizes(numels)
    if config.is_torch_class:
        holding = holding_of(config)
        return holding.num_shaped * size * itemsize + holding.single_bytes * count
    shaped, has_count = _HOLDS[config.name]
    return shaped * size * itemsize + (count * _COUNT_BYTES if has_count else 0)


def refuse_gaps(name: str, tensor: Tensor) -> None:
    """Refuse a parameter whose memory has gaps.

    Raises:
        RequestError: names it.
    """
    if not _is_dense(tensor):
        raise RequestError(
            f"parameter {name!r} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, which leave gaps or "
            "overlap in memory, and a fused optimizer would write into them; make it with .contiguous()"
        )


def _is_dense(tensor: Tensor) -> bool:
    """True when the elements fill one contiguous range of memory, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def export_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """Every state tensor as ``<parameter name>/<state key>``, in the order of names; the live tensors, not copies.

    torch's ``state_dict`` numbers parameters by their place in a group; a group that changes (another exemption, another order)
    would then give a parameter its neighbour's moments without a word. Here every tensor is named after its parameter.

    Args:
        optimizer: one from ``build_optimizer``; state that does not exist yet is made, as zeros.
        names: what each of its parameters is called in the model.
    """
    initialise_state(optimizer)
    found = {
        f"{names[parameter]}/{key}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state[parameter].items()
    }
    return dict(sorted(found.items()))


@torch.no_grad()
def import_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the optimizer's state, bit for bit; nothing is changed when one does not fit.

    Raises:
        RunError: a tensor is missing, is not this optimizer's, or has another shape or type.
    """
    own = export_state(optimizer, names)
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or foreign:
        raise RunError(
            f"the saved optimizer state does not fit: {len(missing)} tensors are missing ({_first(missing)}) and {len(foreign)} "
            f"are not of this {type(optimizer).__name__} ({_first(foreign)}); resume with the optimizer and model of the save"
        )
    for name, target in own.items():
        saved = tensors[name]
        if saved.shape != target.shape or saved.dtype != target.dtype:
            raise RunError(
                f"saved optimizer state {name!r} is {saved.dtype} {tuple(saved.shape)}, and the run needs {target.dtype} "
                f"{tuple(target.shape)}; resume with the model and precision it was saved with"
            )
    for name, target in own.items():
        target.copy_(tensors[name])


def _first(names: list[str]) -> str:
    return f"first {names[0]!r}" if names else "none"


def warm_up() -> None:
    """Make an optimizer before processes are forked: torch then imports its compiler, which takes more than a second."""
    build_optimizer(OptimConfig(), nn.Linear(1, 1))
