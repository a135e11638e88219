"""Builds the optimizer of a run, with its state, from the ``[optim]`` section.

torch's own optimizers are used in their fused form, which runs the same kernel for every tensor whatever else is stepped with it.
What that kernel promises about shards is in ``CUT_MULTIPLE``. LARS and LAMB are ours, because torch has neither.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shoal.core.errors import RequestError
from shoal.optim.config import OptimConfig
from shoal.optim.lamb import Lamb
from shoal.optim.lars import Lars

CUT_MULTIPLE = 16
"""Elements from the start of a tensor at whose multiples a shard may be cut without changing a bit of any update.

The fused CPU kernels of momentum SGD, Adam and AdamW compute the last elements, which do not fill a vector register, by scalar
code that rounds differently (torch 2.13); the widest register holds 16 float32. Plain SGD, Adagrad, LARS and LAMB may be cut
anywhere.
"""

_DEFAULT_EPS = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10, "lamb": 1e-6}
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """The optimizer over the model's trainable parameters: a decayed and an exempt group, each in the order of names.

    Raises:
        RequestError: the model has nothing to train, or a parameter whose memory has gaps.
    """
    groups = _param_groups(config, model)
    eps = config.eps if config.eps is not None else _DEFAULT_EPS.get(config.name, 0.0)
    # Each group carries its own weight decay; what is given here is only the default of groups added later.
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    match config.name:
        case "sgd":
            return SGD(groups, **common, fused=True)
        case "momentum" | "nesterov":
            return SGD(groups, **common, momentum=config.momentum, nesterov=config.name == "nesterov", fused=True)
        case "adam":
            return Adam(groups, **common, betas=config.betas, eps=eps, fused=True)
        case "adamw":
            return AdamW(groups, **common, betas=config.betas, eps=eps, fused=True)
        case "adagrad":
            return Adagrad(groups, **common, eps=eps, fused=True)
        case "lars":
            return Lars(groups, **common, momentum=config.momentum, trust=config.trust)
        case "lamb":
            return Lamb(groups, **common, betas=config.betas, eps=eps)


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def initialise_state(optimizer: Optimizer) -> None:
    """Make the state of every parameter exist before the first step, as zeros; the first step is the same with and without it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _zero_state(optimizer, group, parameter)


def _zero_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    match optimizer:
        case Lars() | Lamb():
            return optimizer.create_state(parameter)
        case SGD():
            if not group["momentum"]:
                return {}
            return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
        case Adam():
            return {
                # A fused step reads its count on the parameter's device.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        case _:
            raise AssertionError(
                f"{type(optimizer).__name__} is not from build_optimizer, or makes its state when it is built"
            )


def _param_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    trainable = sorted((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not trainable:
        raise RequestError(
            f"{type(model).__name__} has no trainable parameter; give it a layer, or set requires_grad on one"
        )
    for name, parameter in trainable:
        if not _is_dense(parameter):
            raise RequestError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, which leave gaps or "
                "overlap in memory, and a fused optimizer would write into them; make it with .contiguous()"
            )
    # Without decay there is nothing to be exempt from, and one group is one kernel call; LARS and LAMB also adapt by group.
    has_groups = config.exempt_1d and (config.weight_decay != 0 or config.name in ("lars", "lamb"))
    exempt = _exempt_names(model, trainable) if has_groups else set()
    decayed = [(name, parameter) for name, parameter in trainable if name not in exempt]
    spared = [(name, parameter) for name, parameter in trainable if name in exempt]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    if config.name in ("lars", "lamb"):
        groups[1]["adapt"] = False
    return [group for group in groups if group["params"]]


def _exempt_names(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> set[str]:
    of_norms = {
        id(parameter) for module in model.modules() if isinstance(module, _NORMS) for parameter in module.parameters()
    }
    return {name for name, parameter in named if parameter.ndim <= 1 or id(parameter) in of_norms}


def _is_dense(tensor: Tensor) -> bool:
    """True when the elements fill one stretch of memory, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
