"""A weight that several stages use as one leaf per stage, so that each stage's use has a gradient of its own.

Autograd adds up the uses of a weight in one pass, microbatch by microbatch. Stages of a pipeline cannot: each has its own sum
over microbatches, and these are added at the end. The difference is a rounding, and a proof that asks for bits must have it.

Which stage reads a weight is a matter of time: a stage begins when its first unit is called, and what is read from then on is
read by it. What code outside of every unit made of a weight earlier and hands to a unit of a later stage was, in the pipeline,
made by that stage for itself: such an argument gets a leaf of its own there, whose gradient is sent on afterwards and is part of
what that stage adds for the microbatch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoal.core.errors import RequestError
from shoal.verify.reference.case import Tree


class SplitUses:
    """The weights of a model that several stages use, for the time being several each."""

    def __init__(self, model: nn.Module, tree: Tree) -> None:
        self._model, self._tree = model, tree
        named = dict(model.named_parameters(remove_duplicate=False))
        self._names = {
            first: [name for name, parameter in named.items() if parameter is named[first]] for first in tree.users
        }
        self._whole = {first: named[first] for first in tree.users}
        self.leaves: dict[str, list[nn.Parameter]] = {
            first: [
                nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad) for _ in tree.users[first]
            ]
            for first, weight in self._whole.items()
        }
        """By the weight's first name, one for each stage that uses it, in the order of stages."""
        self._owners = {
            leaf: (first, stage)
            for first, leaves in self.leaves.items()
            for stage, leaf in zip(tree.users[first], leaves, strict=True)
        }
        self._stage = 0
        self._made: set[Any] = set()
        """Nodes of the graph that are results of units. Held, so that each keeps its identity."""
        self._cuts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By stage and argument: what code outside of units made, and the leaf that the stage's units were given for it."""

    def backward(self, loss: Tensor) -> None:
        """A backward pass; every leaf gets one sum of all that its stage's units and code have, as in a pass of that stage."""
        if not self._cuts:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        every = [leaf for leaves in self.leaves.values() for leaf in leaves]
        before = [leaf.grad for leaf in every]
        for leaf in every:
            leaf.grad = None
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        self._send_on()
        for leaf, earlier in zip(every, before, strict=True):
            leaf.grad = _sum(earlier, leaf.grad)

    def _send_on(self) -> None:
        """Send the gradients of arguments that have a leaf of their own on to the weights, those of a stage together."""
        for stage in sorted({stage for stage, _ in self._cuts}):
            cuts = [cut for (of, _), cut in self._cuts.items() if of == stage and cut[1].grad is not None]
            if cuts:
                with self._receiving(stage):
                    torch.autograd.backward(
                        [made for made, _ in cuts], [leaf.grad for _, leaf in cuts], retain_graph=True
                    )
        self._cuts, self._made = {}, set()

    @contextmanager
    def _receiving(self, stage: int) -> Iterator[None]:
        """Inside, what is added to any leaf of a weight is added to the leaf of one stage."""
        groups = [
            (leaves[users.index(stage)], leaves)
            for first, leaves in self.leaves.items()
            if stage in (users := list(self._tree.users[first]))
        ]
        kept = {leaf: leaf.grad for _, leaves in groups for leaf in leaves}
        for leaf in kept:
            leaf.grad = None
        yield
        for own, leaves in groups:
            # What was read last is added first, as a backward pass comes by.
            total = reduce(_sum, [leaf.grad for leaf in reversed(leaves)], kept[own])
            for leaf in leaves:
                leaf.grad = kept[leaf]
            own.grad = total

    def watch(self) -> list[Any]:
        """Put the leaves into the model, and follow its forward passes; what is to be removed in the end."""
        self._rest()
        handles = [
            self._model.register_forward_pre_hook(lambda *_: self._begin(0), prepend=True),
            self._model.register_forward_hook(self._leave_model),
        ]
        for stage, path in enumerate(self._tree.places, start=1):
            module = self._model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(partial(self._begin_stage, stage), prepend=True))
        for path in dict.fromkeys(self._tree.units):
            module = self._model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        return handles

    def restore(self) -> None:
        """One weight again."""
        for first, names in self._names.items():
            self._put(names, self._whole[first])

    def _rest(self) -> None:
        """Between passes every unit has its own stage's leaf, which it needs where it is computed again in a backward pass."""
        for first, names in self._names.items():
            self._put(names, self.leaves[first][0])
            for group, leaf in zip(self._tree.uses[first], self.leaves[first], strict=True):
                self._put(group, leaf)

    def _put(self, names: Sequence[str], parameter: nn.Parameter) -> None:
        for name in names:
            path, _, own = name.rpartition(".")
            self._model.get_submodule(path)._parameters[own] = parameter

    def _begin_stage(self, stage: int, module: nn.Module, args: Any) -> None:
        self._begin(stage)

    def _begin(self, stage: int) -> None:
        if stage == 0:
            self._cuts, self._made = {}, set()
        self._stage = stage
        for first, names in self._names.items():
            if stage in (users := list(self._tree.users[first])):
                self._put(names, self.leaves[first][users.index(stage)])

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A unit's arguments, those with a leaf of their own that another stage's weights were made into."""
        if not torch.is_grad_enabled():
            return None
        flat, form = tree_flatten((args, kwargs))
        return tree_unflatten([self._cut(value) if isinstance(value, Tensor) else value for value in flat], form)

    def _cut(self, value: Tensor) -> Tensor:
        read, is_of_units = self._look_back(value)
        late = {first for first, stage in read if stage < self._stage - is_of_units}
        if not late:
            return value
        if is_of_units:
            raise self._refusal(late)
        key = (self._stage, id(value))
        if key not in self._cuts:
            self._cuts[key] = (value, value.detach().requires_grad_())
        return self._cuts[key][1]

    def _look_back(self, value: Tensor) -> tuple[set[tuple[str, int]], bool]:
        """The weights that code outside of units made a tensor of, with the stages that read them; and if units had a part."""
        if value in self._owners:
            return {self._owners[value]}, False  # type: ignore[index]
        found, is_of_units, seen = set[tuple[str, int]](), False, set[Any]()
        waiting = [value.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._made:
                is_of_units = True
                continue
            variable = getattr(node, "variable", None)
            if variable is not None and variable in self._owners:
                found.add(self._owners[variable])
            waiting += [following for following, _ in node.next_functions]
        return found, is_of_units

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if next(module.parameters(), None) is None and not any(self._look_back(leaf)[1] for leaf in leaves):
            return  # Every stage makes for itself what needs neither weights nor what other units made.
        self._made |= {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn}

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._rest()
        late = set[str]()
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    late |= {first for first, stage in self._look_back(leaf)[0] if stage < self._stage}
        if late:
            raise self._refusal(late)

    def _refusal(self, names: set[str]) -> RequestError:
        first = min(names)
        return RequestError(
            f"{len(self._tree.users[first])} stages use parameter {first!r}, and what an earlier one made of it is mixed outside "
            "of every unit with what units put out, so one process cannot tell their gradients apart; read it anew there, or cut "
            "the model so that one stage has all its uses"
        )


@contextmanager
def split_uses(model: nn.Module, tree: Tree) -> Iterator[SplitUses]:
    """Inside, every weight that several stages use is several leaves of the same value; outside, it is one again.

    Args:
        model: changed in place for the time being.
        tree: says which weights, and where stages begin.

    Raises:
        RequestError: by a forward pass inside: the stages' uses of a weight cannot be told apart.
    """
    split = SplitUses(model, tree)
    handles = split.watch() if tree.users else []
    try:
        yield split
    finally:
        for handle in handles:
            handle.remove()
        split.restore()


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two gradients, of which neither need be there."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
