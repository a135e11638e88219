"""Which parameters are stepped together: by weight decay, by the patterns of ``optim.groups``, and which are not trained at all.

Decided once over a whole model, by names, so that a rank with a part of it, a parameter server and the one process that they are
compared with make the same groups in the same order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from shoal.core.errors import RequestError, nearest
from shoal.optim.config import GroupConfig, OptimConfig

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_FACTOR = "rate_factor"
"""The key of a group that says what its learning rate is in parts of the schedule's; absent where it is that rate."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What the parameters of one group have in common."""

    weight_decay: float
    rate_factor: float
    """Of the schedule's rate."""
    is_exempt: bool
    """Left out of weight decay and of the trust ratio of LARS and LAMB."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a whole model, in order, and the place of every parameter among them."""

    options: tuple[GroupOptions, ...]
    places: Mapping[str, int]

    def params(self, tensors: Iterable[tuple[str, Tensor]], *, is_layerwise: bool) -> list[dict[str, Any]]:
        """The groups as torch takes them, of the tensors that this rank updates.

        A group of the model that has no tensor on this rank stays, empty: LARS and LAMB gather norms in it with the other ranks.

        Args:
            tensors: by parameter name, in the order of names.
            is_layerwise: for LARS and LAMB, which do not adapt the rate of what is exempt.
        """
        members: list[list[tuple[str, Tensor]]] = [[] for _ in self.options]
        for name, tensor in tensors:
            members[self.places.get(name, 0)].append((name, tensor))
        made = []
        for options, own in zip(self.options, members, strict=True):
            group: dict[str, Any] = {"params": [tensor for _, tensor in own]}
            # Given and not found: torch takes an empty group for one without names, and refuses the mixture.
            group["param_names"] = [name for name, _ in own]
            group["weight_decay"] = options.weight_decay
            if options.rate_factor != 1.0:
                group[_FACTOR] = options.rate_factor
            if options.is_exempt and is_layerwise:
                group["adapt"] = False
            made.append(group)
        return made


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group this learning rate, times its own factor where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[_FACTOR] if _FACTOR in group else lr


def set_second_decay(optimizer: Optimizer, decay: float) -> None:
    """Give every group of Adam or its kin this decay of the second moment."""
    for group in optimizer.param_groups:
        group["betas"] = (group["betas"][0], decay)


def freeze(model: nn.Module, config: OptimConfig) -> None:
    """Take the parameters that ``optim.groups`` freezes out of training.

    Raises:
        RequestError: a pattern matches no parameter of the model, or nothing is left to train.
    """
    if not config.groups:
        return
    named = dict(model.named_parameters())
    is_trained = any(parameter.requires_grad for parameter in named.values())
    for name, place in _matches(config.groups, named).items():
        if place is not None and config.groups[place].frozen:
            named[name].requires_grad_(False)
    if is_trained and not any(parameter.requires_grad for parameter in named.values()):
        shown = ", ".join(repr(group.match) for group in config.groups if group.frozen)
        raise RequestError(
            f"optim.groups freezes all that {type(model).__name__} trains ({shown}); leave something to train"
        )


def decide_groups(config: OptimConfig, model: nn.Module) -> Groups:
    """The groups of a whole model: a decayed and an exempt one, then those of each pattern of ``optim.groups``.

    Raises:
        RequestError: it has nothing to train.
    """
    named = trainable(model)
    # Without decay there is nothing to be exempt from, and one group is one kernel call; LARS and LAMB also adapt by group.
    decays = config.weight_decay != 0 or any(group.weight_decay for group in config.groups)
    has_exempt = config.exempt_1d and (decays or config.name in ("lars", "lamb"))
    exempt = _exempt_names(model, named) if has_exempt else set()
    # The pattern of each parameter; what is frozen is not here any more.
    matches = _matches(config.groups, [name for name, _ in named], refuses=False)
    keys = {name: (place, name in exempt) for name, place in matches.items()}
    order = [key for key in _possible(len(config.groups)) if key in keys.values()]
    return Groups(
        options=tuple(_options(config, *key) for key in order),
        places={name: order.index(key) for name, key in keys.items()},
    )


def _possible(num_patterns: int) -> Iterable[tuple[int | None, bool]]:
    for place in (None, *range(num_patterns)):
        yield place, False
        yield place, True


def _options(config: OptimConfig, place: int | None, is_exempt: bool) -> GroupOptions:
    own = config.groups[place] if place is not None else None
    decay = config.weight_decay if own is None or own.weight_decay is None else own.weight_decay
    factor = 1.0
    if own is not None and own.lr is not None:
        factor = own.lr / config.lr
    elif own is not None and own.lr_factor is not None:
        factor = own.lr_factor
    return GroupOptions(weight_decay=0.0 if is_exempt else decay, rate_factor=factor, is_exempt=is_exempt)


def _matches(groups: tuple[GroupConfig, ...], names: Iterable[str], *, refuses: bool = True) -> dict[str, int | None]:
    """The first pattern that matches each name; None for none.

    Raises:
        RequestError: with ``refuses``, a pattern matches no name at all.
    """
    names = list(names)
    for number, group in enumerate(groups):
        if refuses and not any(_fits(group, name) for name in names):
            near = nearest(group.match, names)
            hint = (
                f"did you mean {near!r}?" if near else f"its parameters are such as {', '.join(map(repr, names[:3]))}"
            )
            raise RequestError(
                f"optim.groups[{number}].match {group.match!r} matches no parameter of the model; {hint} "
                "(* stands for any characters)"
            )
    return {name: next((place for place, group in enumerate(groups) if _fits(group, name)), None) for name in names}


def _fits(group: GroupConfig, name: str) -> bool:
    return fnmatchcase(name, group.match)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What is trained, in the order of names.

    Raises:
        RequestError: there is nothing.
    """
    found = sorted((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not found:
        raise RequestError(
            f"{type(model).__name__} has no trainable parameter; give it a layer, or set requires_grad on one"
        )
    return found


def _exempt_names(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> set[str]:
    of_norms = {
        id(parameter) for module in model.modules() if isinstance(module, _NORMS) for parameter in module.parameters()
    }
    return {name for name, parameter in named if parameter.ndim <= 1 or id(parameter) in of_norms}
