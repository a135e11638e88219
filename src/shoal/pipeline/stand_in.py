"""What stands in for the units of other stages on this rank, and one stage's way through the module around them.

A stand-in gives outputs of the right shape and type, without a value and without memory. Where this rank does not even have the
weights of a unit, the module is still called, and an ``Absent`` in its place is asked for shapes.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shoal.comm.channel import silent
from shoal.costs.fake import every_type
from shoal.randomness.dropout import Calls, DropoutKey
from shoal.telemetry.rngstate import keeping_draws

Received = Sequence[Tensor]
"""What the stage before gave."""


class LeavePass(BaseException):
    """The pass has come to its end here. Not an ``Exception``: a module's own ``except Exception`` must not catch it."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


@dataclass(frozen=True)
class LeftOutput:
    """The output of a module whose pass was left: the flat arguments of the unit at which it was."""

    arguments: list[Any]


@dataclass
class Pass:
    """One forward pass of one stage."""

    stage: int
    received: Received | None
    """None while it is being found out what must be received."""
    call: int = 0
    is_inside: bool = False
    """A unit is running: what it calls is its own affair."""
    stood_in: list[Tensor] = field(default_factory=list)
    swapped: list[tuple[Any, Tensor]] = field(default_factory=list)
    """Arguments of the stage's first unit, and what was received in their place: later units may be given the same ones."""


def has_no_value(value: Any, stood_in: Sequence[Tensor]) -> bool:
    """True for what depends on a stand-in: it is one, or NaN has come through to it."""
    if not isinstance(value, Tensor):
        return False
    return any(value is tensor for tensor in stood_in) or (value.is_floating_point() and bool(value.isnan().any()))


def are_same(one: Any, other: Any) -> bool:
    """True when two results have equal tensors in equal places."""
    first, second = tree_leaves(one), tree_leaves(other)
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


class StandIns:
    """Outputs by the shapes of inputs; a unit is asked once per shape, without computing."""

    def __init__(self, dropout: DropoutKey | None) -> None:
        self.dropout = dropout
        self.has_memory = False
        """Each has memory after all: the module writes to the outputs of its units, as ``x += positions`` does."""
        self.value = math.nan
        """What they are filled with. Not a number, so that what is computed from it is none either; others for a probe."""
        self._known: dict[tuple[Any, ...], Any] = {}

    def of(
        self, call: int, unit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool
    ) -> Any:
        """The output of a unit for these arguments: numbers that are not there, NaN, one expanded to the shape.

        Args:
            call: which unit it is.
            unit: its forward.
            args: by place.
            kwargs: by name.
            mode: whether it trains.
        """
        flat, form = tree_flatten((tuple(args), dict(kwargs)))
        key = (call, mode, form, *(_sign(value) for value in flat))
        if key not in self._known:
            self._known[key] = self._ask(unit, flat, form)
        leaves, output_form, calls = self._known[key]
        if self.dropout is not None:
            # A dropout that this unit shares with a later one goes on counting where it would be.
            self.dropout.skip(calls)
        return tree_unflatten([self._empty(leaf) if isinstance(leaf, _Shape) else leaf for leaf in leaves], output_form)

    def _empty(self, shape: "_Shape") -> Tensor:
        value = self.value if shape.dtype.is_floating_point else int(self.value > 0)
        tensor = torch.tensor(value, dtype=shape.dtype, device=shape.device).expand(shape.size)
        return tensor.clone(memory_format=torch.contiguous_format) if self.has_memory else tensor

    def _ask(self, unit: Callable[..., Any], flat: list[Any], form: Any) -> tuple[list[Any], Any, Calls]:
        flat = [value.detach() if isinstance(value, Tensor) else value for value in flat]
        apart = nullcontext(Calls()) if self.dropout is None else self.dropout.apart()
        with (
            apart as calls,
            keeping_draws(),
            silent(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            torch.no_grad(),
            every_type(),
        ):
            args, kwargs = tree_unflatten(
                [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in flat], form
            )
            output = unit(*args, **kwargs)
        return *tree_flatten(tree_map_only(Tensor, _Shape, output)), calls


class _Shape:
    """Shape, type and device of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device


def _sign(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    return value if isinstance(value, int | float | str | bool | None) else id(value)


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
        """The unit's own: its output may be another in training, and who restores modes sets them one by one."""
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
    absent = [release_unit(model, path, kept=kept) for path in elsewhere]
    # What is left now and not kept is in no unit.
    release_others(model, kept=kept)
    return absent


def release_unit(model: nn.Module, path: str, *, kept: Collection[nn.Parameter]) -> Absent:
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


def release_others(model: nn.Module, *, kept: Collection[nn.Parameter]) -> None:
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
