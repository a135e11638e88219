"""A module cut into a chain of stages without changing its code.

Every stage runs the module's own forward pass. Units of earlier stages are stood in for: they put out tensors of the right shape
without a value and without memory. When the stage's first unit is called, the tensors that came from the stage before take the
place of its arguments; when the next stage's first unit is called, the pass is left with that unit's arguments in hand, which are
what the next stage gets. Names, parameters, hooks and whatever other techniques did to the units stay as they are.

Why not a graph: ``torch.export`` and ``torch.fx`` fix control flow and shapes, take the module apart and give its parameters
other names; every technique that finds modules by path would have to be done again on the graph.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoal.core.errors import RequestError, RunError
from shoal.parallel.find.trace import undisturbed
from shoal.pipeline.absent import let_go, let_go_of_parameter
from shoal.pipeline.standin import StandIns
from shoal.pipeline.units import Unit

_PROBES = (1e4, -1e4)
"""Values of stand-ins that every type has and that no comparison takes for each other."""
Received = Sequence[Tensor]
"""What the stage before gave."""


class _Left(BaseException):
    """The pass has come to its end here. Not an ``Exception``: a module's own ``except Exception`` must not catch it."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments


@dataclass
class _Pass:
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


class Chain:
    """A module and where its stages begin.

    Args:
        model: each unit's ``forward`` is wrapped, in place.
        units: its chain of calls.
        starts: the index of each stage's first unit; the first is 0.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], starts: Sequence[int]) -> None:
        self.model = model
        self.units = tuple(units)
        self.starts = tuple(starts)
        self.num_stages = len(starts)
        self.parcels: list[tuple[int, ...]] = [()] * self.num_stages
        """Of each stage: which of its first unit's flat arguments come from the stage before."""
        self._stage_of_call = [sum(call >= start for start in starts) - 1 for call in range(len(units))]
        self._stand_ins = StandIns()
        self._free: set[int] = set()
        """Calls of units without weights whose output depends on nothing but the inputs: every stage makes them for itself."""
        self._written: set[int] = set()
        """Stages that write to what they receive, as ``nn.ReLU(inplace=True)`` does: autograd wants a copy for that."""
        self._pass: _Pass | None = None
        self._loose: dict[str, frozenset[int]] = {}
        """Parameters that are in no unit, and the stages that read them."""
        self._whole = dict(model.named_parameters())
        for path in dict.fromkeys(unit.path for unit in units):
            module = model.get_submodule(path)
            module.__dict__["forward"] = functools.partial(self._enter, path, module.forward)

    def stages_of(self, path: str) -> frozenset[int]:
        """The stages that call a unit."""
        return frozenset(self._stage_of_call[call] for call, unit in enumerate(self.units) if unit.path == path)

    def holders(self) -> dict[str, frozenset[int]]:
        """The stages that hold each parameter of the whole module; more than one where a weight is tied or read in several."""
        found: dict[int, frozenset[int]] = {}
        for path in dict.fromkeys(unit.path for unit in self.units):
            for parameter in self.model.get_submodule(path).parameters():
                found[id(parameter)] = found.get(id(parameter), frozenset()) | self.stages_of(path)
        return {
            name: found.get(id(parameter), frozenset()) | self._loose.get(name, frozenset())
            for name, parameter in self._whole.items()
        }

    def keep(self, stages: Collection[int]) -> dict[str, nn.Parameter]:
        """Let go of the weights of all other stages; those that stay, by their names in the whole module."""
        own = {name: self._whole[name] for name, holders in self.holders().items() if not holders.isdisjoint(stages)}
        for path in dict.fromkeys(unit.path for unit in self.units):
            if self.stages_of(path).isdisjoint(stages):
                let_go(self.model, path, kept=own.values())
        for name in self._loose:
            if name not in own:
                let_go_of_parameter(self.model, name)
        self._whole = {name: parameter for name, parameter in self._whole.items() if name in own}
        return own

    def run(
        self, stage: int, inputs: Sequence[Any], received: Received = (), weights: Mapping[str, Tensor] | None = None
    ) -> Any:
        """One stage's forward pass: the tensors for the next stage, or what the model puts out on the last.

        Args:
            stage: which.
            inputs: the model's own inputs, of which later stages read what does not depend on weights, such as a mask.
            received: what the stage before gave.
            weights: by parameter name, in place of the parameters.
        """
        arguments, output = self._forward(_Pass(stage, received), inputs, weights)
        if arguments is not None:
            return tuple(arguments[place] for place in self.parcels[stage + 1])
        if stage != self.num_stages - 1:
            unit = self.units[self.starts[stage + 1]].path
            raise RunError(
                f"the forward pass ended before it called {unit!r}, where stage {stage + 1} begins; "
                "a module that is cut must take the same way for every batch"
            )
        return output

    def settle(self, example: Sequence[Any]) -> None:
        """Find out what each stage needs of the one before it, and prove on an example that the chain is the module.

        Raises:
            RequestError: something reaches a stage past the units at which it is cut; names the unit.
        """
        try:
            self._prove(example)
        except RuntimeError:
            # Stand-ins without memory cannot be written to. Whatever else it was is raised again.
            self._stand_ins.has_memory = True
            self._free.clear()
            self._prove(example)
        self._find_loose(example)

    def _prove(self, example: Sequence[Any]) -> None:
        with undisturbed(self.model, training=False), torch.no_grad():
            whole = self.model(*example)
            self._find_free(example)
            for stage in range(1, self.num_stages):
                self.parcels[stage] = self._probe(stage, example)
            received: Any = ()
            for stage in range(self.num_stages):
                given, writes = received, [tensor._version for tensor in received]
                # Before the pass that may write to what it is given.
                probed = [self._run_with(value, stage, example, given) for value in _PROBES]
                received = self.run(stage, example, given)
                self._refuse_other(stage, probed, received)
                if [tensor._version for tensor in given] != writes:
                    self._written.add(stage)
        if not _same(whole, received):
            raise RequestError("the stages one after another do not give what the module gives; cut it elsewhere")

    def _probe(self, stage: int, example: Sequence[Any]) -> tuple[int, ...]:
        """Which arguments of a stage's first unit depend on units of other stages."""
        found: set[int] = set()
        seen: list[list[Any]] = []
        for value in (math.nan, *_PROBES):
            this = _Pass(stage, None)
            arguments = self._filled(value, lambda this=this: self._forward(this, example)[0])  # type: ignore[misc]
            assert arguments is not None
            found |= {place for place, given in enumerate(arguments) if _has_no_value(given, this.stood_in)}
            seen.append(arguments)
        # NaN does not come through a comparison or a rounding; that two values give two results shows it.
        first, *others = seen
        found |= {place for other in others for place, given in enumerate(other) if not _same(first[place], given)}
        return tuple(sorted(found))

    def _run_with(self, value: float, stage: int, example: Sequence[Any], received: Received) -> Any:
        return self._filled(value, lambda: self.run(stage, example, [tensor.clone() for tensor in received]))

    def _filled(self, value: float, work: Callable[[], Any]) -> Any:
        """Do something with stand-ins that have a value."""
        self._stand_ins.value = value
        try:
            return work()
        finally:
            self._stand_ins.value = math.nan

    def _find_loose(self, example: Sequence[Any]) -> None:
        """Which stages read the parameters that are in no unit, by whose gradients are there."""
        paths = tuple(f"{unit.path}." for unit in self.units)
        loose = {name: parameter for name, parameter in self._whole.items() if not name.startswith(paths)}
        if not loose:
            return
        found: dict[str, frozenset[int]] = dict.fromkeys(loose, frozenset())
        with undisturbed(self.model, training=False), torch.enable_grad():
            received: Any = ()
            for stage in range(self.num_stages):
                outputs = tree_leaves(self.run(stage, example, received))
                sources = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
                grads = torch.autograd.grad(
                    [source.sum() for source in sources], list(loose.values()), allow_unused=True
                )
                for name, grad in zip(loose, grads, strict=True):
                    if grad is not None:
                        found[name] |= {stage}
                received = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        self._loose = found

    def _find_free(self, example: Sequence[Any]) -> None:
        """Try the units without weights one by one on inputs that have no value: what comes out with one needs none."""
        for call, unit in enumerate(self.units[: self.starts[-1]]):
            if any(True for _ in self.model.get_submodule(unit.path).parameters()):
                continue
            outputs: list[Any] = []
            hook = self.model.get_submodule(unit.path).register_forward_hook(
                lambda *seen, into=outputs: into.append(seen[-1])
            )
            self._free.add(call)
            try:
                self._forward(_Pass(self._stage_of_call[call] + 1, None), example)
            finally:
                hook.remove()
            if not outputs or any(_has_no_value(value, ()) for value in tree_leaves(outputs)):
                self._free.discard(call)

    def _refuse_other(self, stage: int, probed: Sequence[Any], values: Any) -> None:
        """Refuse a stage whose result depends on what it did not receive."""
        is_missing = any(_has_no_value(value, ()) for value in tree_leaves(values))
        if stage > 0 and (is_missing or not all(_same(other, values) for other in probed)):
            unit = self.units[self.starts[stage]].path
            raise RequestError(
                f"stage {stage}, from {unit!r} on, reads something of an earlier stage that is no argument of {unit!r}; "
                "cut where all that is still needed goes through one call, or keep these units in one stage"
            )

    def _forward(
        self, this: _Pass, inputs: Sequence[Any], weights: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Any] | None, Any]:
        """The flat arguments of the unit at which the pass was left, or what it put out at its end."""
        self._pass = this
        try:
            if weights is not None:
                return None, functional_call(self.model, dict(weights), tuple(inputs))
            return None, self.model(*inputs)
        except _Left as left:
            return left.arguments, None
        finally:
            self._pass = None

    def _enter(self, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        this = self._pass
        if this is None or this.is_inside:
            return original(*args, **kwargs)
        call, this.call = this.call, this.call + 1
        if call >= len(self.units) or self.units[call].path != path:
            expected = self.units[call].path if call < len(self.units) else "nothing more"
            raise RunError(
                f"the forward pass calls {path!r} where it called {expected!r} on the example; "
                "a module that is cut must take the same way for every batch"
            )
        stage = self._stage_of_call[call]
        this.is_inside = True
        try:
            if stage < this.stage and call not in self._free:
                output = self._stand_ins.of(call, original, args, kwargs)
                this.stood_in += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                return output
            if stage > this.stage or (call == self.starts[stage] and this.received is None and stage > 0):
                raise _Left(tree_leaves((args, kwargs)))
            if 0 < stage == this.stage:
                args, kwargs = self._receive(this, call, args, kwargs)
            return original(*args, **kwargs)
        finally:
            this.is_inside = False

    def _receive(self, this: _Pass, call: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a unit, with what came from the stage before in its place."""
        flat, form = tree_flatten((args, kwargs))
        if call == self.starts[this.stage]:
            assert this.received is not None
            parcels, received = self.parcels[this.stage], this.received
            if this.stage in self._written:
                received = [tensor.clone() for tensor in received]
            this.swapped = [(flat[place], tensor) for place, tensor in zip(parcels, received, strict=True)]
        flat = [next((new for old, new in this.swapped if old is value), value) for value in flat]
        placed: tuple[Any, Any] = tree_unflatten(flat, form)
        return placed


def _has_no_value(value: Any, stood_in: Sequence[Tensor]) -> bool:
    """True for what depends on a stand-in: it is one, or NaN has come through to it."""
    if not isinstance(value, Tensor):
        return False
    return any(value is tensor for tensor in stood_in) or (value.is_floating_point() and bool(value.isnan().any()))


def _same(one: Any, other: Any) -> bool:
    first, second = tree_leaves(one), tree_leaves(other)
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
