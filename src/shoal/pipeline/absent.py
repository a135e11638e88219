"""Units of other stages on a rank that does not have their weights: the module is still called, and is asked for shapes."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn


class Absent(nn.Module):
    """In the place of a unit whose weights are on another rank. It has no parameters, so nobody trains or saves them here."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping: what is inside must not be found.
        self.__dict__["unit"] = unit
        self.__dict__["forward"] = unit.forward

    def __getattr__(self, name: str) -> Any:
        """A model may read what its blocks are like, such as their kind of attention."""
        unit = self.__dict__.get("unit")
        if unit is None:
            raise AttributeError(name)
        return getattr(unit, name)


def let_go(model: nn.Module, path: str, *, kept: Collection[nn.Parameter]) -> None:
    """Put an ``Absent`` in a unit's place and free its weights, but for those that are kept elsewhere on this rank."""
    unit = model.get_submodule(path)
    stay = {id(parameter) for parameter in kept}
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in stay:
                module.register_parameter(name, nn.Parameter(_without_memory(parameter), requires_grad=False))
    parent, _, last = path.rpartition(".")
    model.get_submodule(parent)._modules[last] = Absent(unit)


def let_go_of_parameter(model: nn.Module, name: str) -> None:
    """Free a parameter that is in no unit; code that reads it on the way to this rank's stages still finds its shape."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = module._parameters.pop(last)
    assert parameter is not None
    module.__dict__[last] = _without_memory(parameter)


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """NaN in every place: should a value of another stage be read after all, the loss shows it."""
    value = math.nan if parameter.is_floating_point() else 0
    return torch.tensor(value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
