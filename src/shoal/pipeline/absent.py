"""Units of other stages on a rank that does not have their weights: the module is still called, and is asked for shapes."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Absent(nn.Module):
    """In the place of a unit whose weights are on another rank.

    It has none of its parameters, so nobody trains or saves them here, but for those that another unit of this rank shares:
    these keep the place, and so the name, that they have in the whole module.
    """

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping: what is inside must not be found.
        self.__dict__["unit"] = unit
        self.__dict__["forward"] = unit.forward
        # The very same ones, so that what is added or removed by a handle later counts too: where a sequence is cut and put
        # together again, and where the tail of dropout begins, is said by hooks of blocks that may be on another rank.
        self.__dict__.update({name: unit.__dict__[name] for name in _HOOKS})

    def __getattr__(self, name: str) -> Any:
        """A model may read what its blocks are like, such as their kind of attention."""
        if name in self.__dict__.get("_parameters", ()):
            return self.__dict__["_parameters"][name]
        unit = self.__dict__.get("unit")
        if unit is None:
            raise AttributeError(name)
        return getattr(unit, name)

    @property
    def training(self) -> bool:
        """The unit's own: it may put out something else in training, and who restores modes sets them one by one."""
        unit = self.__dict__.get("unit")
        return unit is None or bool(unit.training)

    @training.setter
    def training(self, mode: bool) -> None:
        unit = self.__dict__.get("unit")
        if unit is not None:
            unit.train(mode)

    def hold(self, path: str, parameter: nn.Parameter) -> None:
        """Show a parameter of the unit's at its path, for those who look for parameters by name."""
        *parents, last = path.split(".")
        module: nn.Module = self
        for parent in parents:
            if parent not in module._modules:
                module._modules[parent] = nn.Module()
            child = module._modules[parent]
            assert child is not None
            module = child
        # Not registered: that refuses a name which the unit behind has, and it has them all.
        module._parameters[last] = parameter


def keep_part(model: nn.Module, *, elsewhere: Collection[str], kept: Collection[nn.Parameter]) -> list[Absent]:
    """Let go of the units at some paths and of every parameter that is not kept; what took the units' places."""
    absent = [let_go(model, path, kept=kept) for path in elsewhere]
    # What is left now and not kept is in no unit.
    let_go_of_others(model, kept=kept)
    return absent


def let_go(model: nn.Module, path: str, *, kept: Collection[nn.Parameter]) -> Absent:
    """Put an ``Absent`` in a unit's place and free its weights, but for those that are kept elsewhere on this rank."""
    unit = model.get_submodule(path)
    stay = {id(parameter) for parameter in kept}
    absent = Absent(unit)
    # Each name of each, as in the whole module: a checkpoint has a weight under all of them.
    for name, parameter in unit.named_parameters(remove_duplicate=False):
        if id(parameter) in stay:
            absent.hold(name, parameter)
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in stay:
                module.register_parameter(name, nn.Parameter(_without_memory(parameter), requires_grad=False))
    parent, _, last = path.rpartition(".")
    model.get_submodule(parent)._modules[last] = absent
    return absent


def let_go_of_others(model: nn.Module, *, kept: Collection[nn.Parameter]) -> None:
    """Free parameters that are in no unit; code that reads them on the way to this rank's stages still finds their shape."""
    stay = {id(parameter) for parameter in kept}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in stay:
                del module._parameters[name]
                module.__dict__[name] = _without_memory(parameter)


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """NaN in every place: should a value of another stage be read after all, the loss shows it."""
    value = math.nan if parameter.is_floating_point() else 0
    return torch.tensor(value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
