"""Optimizers that a recipe names by their class in torch: ``name = "torch.optim.NAdam"``, with arguments in ``[optim.args]``.

Which classes can be had is not a list. A class is tried on a small tensor, once: whether its state can be made before the first
step, whether a tensor that is cut into two gets the bits of a whole one, and what it keeps. What passes works under every plan,
on servers and in checkpoints, because these rely on nothing else.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shoal.core.errors import RequestError, did_you_mean
from shoal.optim.config import TORCH, OptimConfig
from shoal.optim.flat import CUT_MULTIPLE, SINGLES
from shoal.optim.rates import rate

# What the recipe says elsewhere, or what decides which kernel runs: the one whose bits do not depend on other tensors.
_ELSEWHERE = {"lr": "optim.lr", "weight_decay": "optim.weight_decay"}
_KERNELS = ("foreach", "fused", "capturable", "differentiable")
REASONS = {
    "Adafactor": "keeps state by rows and columns and measures whole tensors, which shards do not have; use adamw or lamb",
    "LBFGS": "asks for the loss several times in one step; parameter servers have it as update=lbfgs in the plan",
    "Muon": "makes whole matrices orthogonal, and takes neither vectors nor parts; use adamw or lamb",
    "SparseAdam": f"takes sparse gradients only, and gradients are added up dense; use {TORCH}Adam",
}
Make = Callable[[list[nn.Parameter], float], Optimizer]
"""An optimizer over some tensors, with this learning rate."""
_ERRORS = (TypeError, ValueError, IndexError, RuntimeError, AttributeError, ArithmeticError)
"""What a class of torch raises when its arguments make no sense."""
_ROWS, _COLUMNS = 6, CUT_MULTIPLE // 2
_STEPS = 3
_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What an optimizer keeps for each parameter."""

    num_shaped: int
    """Tensors of the parameter's shape and type."""
    single_bytes: int
    """Bytes of its single numbers."""
    follows_rate: bool
    """A learning rate that changes after the first step changes what it does."""


def check_named(config: OptimConfig) -> None:
    """Refuse a class of torch that is none, that cannot be used here, or that is given wrong arguments or a schedule in vain.

    Raises:
        RequestError: with the nearest name, the arguments that it takes, or the reason.
    """
    if not config.is_torch_class or holding_of(config).follows_rate:
        return
    for key, value, still in (("warmup", config.warmup, 0), ("schedule", config.schedule, "constant")):
        if value != still:
            raise RequestError(
                f"optim.{key} {value}: {config.name} reads the learning rate at its first step and never again; leave "
                f"optim.{key} out, or use another optimizer"
            )


def holding_of(config: OptimConfig) -> Holding:
    """What the class that a section names keeps, found out by using it.

    Raises:
        RequestError: as ``check_named``.
    """
    arguments = json.dumps(config.args, sort_keys=True, default=str)
    return _examine(config.name, arguments, config.weight_decay)


def build_named(config: OptimConfig, param_groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer over these groups.

    Raises:
        RequestError: as ``check_named``.
    """
    check_named(config)
    # Some begin their state with the rate (ASGD's eta), which torch makes at the first step, and here it is made before. The
    # rate of that step does not depend on how many there are.
    return _make(_find(config.name), rate(config, 0, total_steps=1), config.args, param_groups)


def early_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state that torch gives a parameter when it first steps it, made now.

    A class that begins with the learning rate (ASGD's eta, Rprop's step sizes) begins with the group's of now, which is that of
    the first step since ``build_named``.
    """
    if isinstance(optimizer, SGD):
        # It makes none before it has stepped; zeros give the same first step.
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}
    # torch has no public way to ask for it. The lists are those in which it hands tensors on to its kernels.
    fill = getattr(optimizer, "_init_group", None)
    if fill is None:
        return {}
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(fill).parameters)[1:]]
    given = parameter.grad
    # Only parameters with a gradient get state; this one has no memory.
    parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    try:
        fill({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = given
    made: dict[str, Tensor] = optimizer.state[parameter]
    return made


def _find(name: str) -> type[Optimizer]:
    choices = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    wanted = name.removeprefix(TORCH)
    if wanted in choices:
        return choices[wanted]
    alike = [key for key in choices if key.lower() == wanted.lower()]
    hint = f"did you mean {alike[0]!r}?" if alike else did_you_mean(wanted, choices)
    raise RequestError(f"optim.name {name!r}: torch.optim has no {wanted!r}; {hint}")


def _make(
    kind: Callable[..., Optimizer], lr: float, arguments: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Optimizer:
    takes = inspect.signature(kind).parameters
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    # The same kernel for every tensor, whatever else is stepped with it.
    how = {"fused": True} if "fused" in takes else {"foreach": False} if "foreach" in takes else {}
    return kind(groups, lr=lr, **given, **how)


@cache
def _examine(name: str, arguments_json: str, weight_decay: float) -> Holding:
    kind, arguments = _find(name), json.loads(arguments_json)
    if kind.__name__ in REASONS:
        raise RequestError(f"optim.name {name!r} cannot be used: it {REASONS[kind.__name__]}")
    _refuse_arguments(name, kind, arguments, weight_decay)
    # Zero too: a run gives it always, and torch's own default is not zero for every class (AdamW).
    decay = {"weight_decay": weight_decay} if "weight_decay" in inspect.signature(kind).parameters else {}
    label = f"optim.name {name!r}" + (f" with args {arguments}" if arguments else "")
    try:
        return examine(lambda parts, rate: _make(kind, rate, arguments, [{"params": parts, **decay}]), label)
    except _ERRORS as error:
        raise RequestError(
            f"optim.name {name!r} does not work with these arguments: {error}; {_taken(kind, arguments)}"
        ) from error


def examine(make: Make, label: str) -> Holding:
    """What an optimizer keeps, found out by using it on a small tensor: whole, and cut into two.

    Args:
        make: gives an optimizer over some tensors, with this learning rate.
        label: what messages call it.

    Raises:
        RequestError: it cannot be used under every plan; says why.
        Exception: of the optimizer's own, such as a ValueError for an argument.
    """
    whole, _ = _try(make, [_ROWS], is_early=False)
    early, keeps = _try(make, [_ROWS], is_early=True)
    parts, _ = _try(make, [2, _ROWS - 2], is_early=True)
    risen, _ = _try(make, [_ROWS], is_early=True, later_rate=2 * _RATE)
    _refuse_infinite(label, whole)
    if whole.keys() != early.keys() or not _is_equal(whole, early):
        raise RequestError(
            f"{label} cannot be used: its state at the first step is not the one that is made before it, which "
            f"checkpoints and servers need; leave its arguments out, or use another optimizer"
        )
    shaped = [key for key, value in keeps.items() if value.shape == (_ROWS, _COLUMNS) and key not in SINGLES]
    singles = [key for key, value in keeps.items() if value.ndim == 0 and key in SINGLES]
    for key in sorted(keeps.keys() - {*shaped, *singles}):
        raise RequestError(
            f"{label} cannot be used: its state {key!r} has shape {tuple(keeps[key].shape)} for a parameter of "
            f"{(_ROWS, _COLUMNS)}, and is not known to be a single number; use another optimizer"
        )
    late = sorted(keeps.keys() - _begun(make).keys())
    if late:
        raise RequestError(
            f"{label} cannot be used: its state {late[0]!r} appears at its first step, and checkpoints need it before; give the "
            f"class an _init_group as torch's own have, or use another optimizer"
        )
    if not _is_equal(early, parts):
        raise RequestError(
            f"{label} cannot be used: an element's update depends on other elements of its tensor, and tensors are "
            f"cut into shards; use one that is elementwise, such as adamw"
        )
    return Holding(
        num_shaped=len(shaped),
        single_bytes=sum(keeps[key].nbytes for key in singles),
        follows_rate=not torch.equal(early["weights"], risen["weights"]),
    )


def _begun(make: Make) -> Mapping[str, Tensor]:
    """The state that can be made before a first step."""
    optimizer = make([nn.Parameter(torch.zeros(_ROWS, _COLUMNS))], _RATE)
    group = optimizer.param_groups[0]
    return early_state(optimizer, group, group["params"][0])


def _refuse_infinite(label: str, found: Mapping[str, Tensor]) -> None:
    # First of all comparisons: NaN is not equal to itself, so each of them would give a reason of its own.
    for key, value in sorted(found.items()):
        if not value.isfinite().all():
            raise RequestError(
                f"{label} cannot be used: after {_STEPS} steps of a small tensor its {key} are not finite; give it others"
            )


def _refuse_arguments(name: str, kind: type[Optimizer], arguments: Mapping[str, Any], weight_decay: float) -> None:
    for key in sorted(arguments):
        if key in _ELSEWHERE:
            raise RequestError(f"optim.args.{key}: set {_ELSEWHERE[key]} instead, which schedules and groups follow")
        if key in _KERNELS:
            raise RequestError(
                f"optim.args.{key}: which kernel runs is chosen so that shards change no bit; leave it out"
            )
        if key not in _free(kind):
            raise RequestError(f"optim.args.{key}: {name} takes no {key!r}; {_taken(kind, arguments)}")
    if weight_decay and "weight_decay" not in inspect.signature(kind).parameters:
        raise RequestError(f"optim.weight_decay {weight_decay:g}: {name} has no weight decay; leave it out")


def _free(kind: type[Optimizer]) -> dict[str, Any]:
    """The arguments that a recipe may give, with their defaults."""
    kept = {"params", *_ELSEWHERE, *_KERNELS}
    return {key: one.default for key, one in inspect.signature(kind).parameters.items() if key not in kept}


def _taken(kind: type[Optimizer], arguments: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{key} (default {value})" for key, value in sorted(_free(kind).items()))
    return f"it takes {listed}" + (f", and was given {dict(arguments)}" if arguments else "")


def _try(
    make: Make, rows: Sequence[int], *, is_early: bool, later_rate: float = _RATE
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and state after some steps of a matrix that is held in parts of so many rows; and the state of the first part."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=generator, dtype=torch.float32)
    weights, *gradients = (one.split(list(rows)) for one in values)
    parts = [nn.Parameter(part.clone()) for part in weights]
    optimizer = make(parts, _RATE)
    if is_early:
        for part in parts:
            if not optimizer.state[part]:
                optimizer.state[part] = early_state(optimizer, optimizer.param_groups[0], part)
    for gradient in gradients:
        for part, share in zip(parts, gradient, strict=True):
            part.grad = share.clone()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = later_rate
    keeps = dict(optimizer.state[parts[0]])
    shaped = {key for key, value in keeps.items() if isinstance(value, Tensor) and value.ndim}
    found = {"weights": torch.cat([part.detach() for part in parts])}
    found |= {key: torch.cat([optimizer.state[part][key] for part in parts]) for key in shaped}
    found |= {key: torch.as_tensor(keeps[key]) for key in keeps.keys() - shaped if keeps[key] is not None}
    return found, {key: torch.as_tensor(value) for key, value in keeps.items() if value is not None}


def _is_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, second[key]) for key, value in first.items())
