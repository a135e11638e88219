"""An optimizer object that a script made over the whole model: kept as it is, while its groups get this rank's tensors.

    given = GivenOptimizer(torch.optim.AdamW(groups, lr=1e-3), model)      # before the model is laid out
    optimizer = given.adopt(updated)                                       # after: the very same object

Rates, decays and order of its groups stay, and so do schedulers that hold it. Which classes can be used is not a list: the
object's class is tried with each group's own values, as ``optim/torchclass.py`` tries one that a recipe names.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from shoal.core.errors import RequestError
from shoal.optim.build import refuse_gaps
from shoal.optim.torchclass import REASONS, examine

_MEMBERS = ("params", "param_names")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class GivenOptimizer:
    """An optimizer object and the names of its parameters, found while the model still has them.

    Args:
        optimizer: the script's own.
        model: as one process builds it.

    Raises:
        RequestError: the object holds no parameter of the model, or one that is not the model's; it has taken steps already; or
            its class cannot be used on parts of tensors.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise RequestError(
                f"optimizer is a {kind}; give an object of a torch.optim class, or a function of the model that makes one"
            )
        if _has_stepped(optimizer):
            raise RequestError(
                f"the {kind} has taken steps or loaded a state already, over whole tensors; set it up before its first step, and "
                "load a checkpoint afterwards"
            )
        named = {parameter: name for name, parameter in model.named_parameters()}
        self.names = [[_name(one, named, kind, model) for one in group["params"]] for group in optimizer.param_groups]
        """Of each group's parameters, in the order of the group."""
        trained = {name for parameter, name in named.items() if parameter.requires_grad}
        if not trained.intersection(name for names in self.names for name in names):
            raise RequestError(
                f"the {kind} has no parameter of {type(model).__name__} that is trained; give it model.parameters(), and set "
                "requires_grad on one of them"
            )
        _check_class(optimizer)

    def adopt(self, updated: Mapping[str, nn.Parameter]) -> Optimizer:
        """The object, with this rank's tensors in the place of the model's; a parameter that other ranks update is left out.

        Args:
            updated: the tensors that this rank updates, by parameter name.
        """
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            own = [name for name in names if name in updated]
            for name in own:
                refuse_gaps(name, updated[name])
            group["params"] = [updated[name] for name in own]
            if "param_names" in group:
                group["param_names"] = own
            _choose_kernel(group)
        self.optimizer.state.clear()
        _begin_state(self.optimizer)
        return self.optimizer


def _has_stepped(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, Adagrad):
        return any(float(state["step"]) for state in optimizer.state.values())
    return any(optimizer.state.values())


def _begin_state(optimizer: Optimizer) -> None:
    """Make the state that the class makes in its constructor, which did not see these tensors; others make theirs later."""
    if not isinstance(optimizer, Adagrad):
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            total = torch.full_like(tensor, group["initial_accumulator_value"], memory_format=torch.preserve_format)
            optimizer.state[tensor] = {"step": torch.tensor(0.0, dtype=torch.float32), "sum": total.detach()}


def _name(parameter: Any, named: Mapping[nn.Parameter, str], kind: str, model: nn.Module) -> str:
    if parameter not in named:
        raise RequestError(
            f"the {kind} holds a tensor of shape {tuple(parameter.shape)} that is no parameter of {type(model).__name__}; make "
            "it over the parameters of the model that it is set up with, and one optimizer for each model"
        )
    return named[parameter]


def _choose_kernel(group: dict[str, Any]) -> None:
    """The kernel that runs on every tensor by itself: its bits do not depend on what else is stepped with it."""
    is_on_gpu = any(tensor.is_cuda for tensor in group["params"])
    if "fused" in group and is_on_gpu:
        group["fused"] = True
    elif "foreach" in group:
        group["foreach"] = False


def _check_class(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.") and kind.__name__ in REASONS:
        raise RequestError(f"optimizer {kind.__name__} cannot be used: it {REASONS[kind.__name__]}")
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in _MEMBERS}
        if values.get("foreach"):
            raise RequestError(
                f"optimizer {kind.__name__}: foreach=True steps tensors together, and an element's last bit then depends on "
                "where a tensor is cut into shards; leave it out, or give fused=True"
            )
        # A scheduler's warm-up may begin at a rate of nothing, of which nothing could be seen.
        values = {key: value for key, value in values.items() if key not in ("lr", "initial_lr")}
        if values not in tried:
            tried.append(values)
            examine(partial(_twin, optimizer, values), f"optimizer {kind.__name__}")


def _twin(optimizer: Optimizer, values: Mapping[str, Any], parts: list[nn.Parameter], rate: float) -> Optimizer:
    """Another optimizer of the same class and values, over other tensors. Not by its constructor: that may ask for anything."""
    twin: Optimizer = object.__new__(type(optimizer))
    # A scheduler puts a step of its own on the object, which counts calls.
    twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    twin.__dict__.update({key: OrderedDict() for key in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**values, "lr": rate, "params": parts}]
    _choose_kernel(twin.param_groups[0])
    _begin_state(twin)
    return twin
