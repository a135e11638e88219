"""A tied weight as one leaf per stage that uses it, so that each use has a gradient of its own.

Autograd adds up the uses of a weight in one pass, microbatch by microbatch. Stages of a pipeline cannot: each has its own sum
over microbatches, and these are added at the end. The difference is a rounding, and a proof that asks for bits must have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from shoal.core.errors import RequestError


@contextmanager
def split_uses(
    model: nn.Module, uses: Mapping[str, Sequence[Sequence[str]]]
) -> Iterator[Mapping[str, Sequence[nn.Parameter]]]:
    """Inside, every tied weight is several leaves of the same value, given by the weight's first name; outside, it is one again.

    Args:
        model: changed in place for the time being.
        uses: of each tied weight, by its first name, the names under which each stage uses it.

    Raises:
        RequestError: two stages use the weight in one and the same module.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    leaves: dict[str, list[nn.Parameter]] = {}
    for first, groups in uses.items():
        _check(model, first, groups, named)
        weight = named[first]
        leaves[first] = [
            nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad) for _ in range(len(groups))
        ]
    try:
        for first, groups in uses.items():
            for group, leaf in zip(groups, leaves[first], strict=True):
                for name in group:
                    _put(model, name, leaf)
        yield leaves
    finally:
        for first, groups in uses.items():
            for name in (name for group in groups for name in group):
                _put(model, name, named[first])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, own = _owner(model, name)
    module._parameters[own] = parameter


def _check(model: nn.Module, first: str, groups: Sequence[Sequence[str]], named: Mapping[str, nn.Parameter]) -> None:
    """A name that is left out would keep its gradient to itself, and the sum would be wrong without a word."""
    stages: dict[tuple[nn.Module, str], int] = {}
    for stage, group in enumerate(groups):
        for name in group:
            if stages.setdefault(_owner(model, name), stage) != stage:
                raise RequestError(
                    f"{len(groups)} stages use parameter {first!r}, two of them in the one module of {name!r}, so one process "
                    "cannot tell their gradients apart; tie two modules, or cut the model so that one stage has all its uses"
                )
    given = {name for group in groups for name in group}
    aliases = {name for name, parameter in named.items() if parameter is named[first]}
    assert given == aliases, f"stages use {first} as {sorted(given)}, and the model has it as {sorted(aliases)}"
