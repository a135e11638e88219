"""A module cut into a chain of stages without changing its code.

Every stage runs the module's own forward pass. Units of earlier stages are stood in for: they output tensors of the right
shape without a value and without memory. When the stage's first unit is called, the tensors that came from the stage before
take the place of its arguments; when the next stage's first unit is called, the pass is left with that unit's arguments in
hand, which are what the next stage gets. Names, parameters, hooks and whatever other techniques did to the units stay as they
are.

Why not a graph: ``torch.export`` and ``torch.fx`` fix control flow and shapes, take the module apart and give its parameters
other names; every technique that finds modules by path would have to be done again on the graph.
"""

import functools
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.utils.stateless import _reparametrize_module  # what functional_call is; a recompute needs it again
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoal.comm.channel import silent
from shoal.core.errors import RequestError, RunError
from shoal.costs.tracer import preserved_state
from shoal.data.batchform import call_model
from shoal.parallel.recompute import surrounding
from shoal.pipeline.p2p import message_problem
from shoal.pipeline.stand_in import LeavePass, LeftOutput, Pass, Received, StandIns, are_same, has_no_value, keep_part
from shoal.pipeline.units import Unit
from shoal.randomness.dropout import DropoutKey

_PROBES = (1e4, -1e4)
"""Values of stand-ins that every type has and that no comparison takes for each other."""


class IllegalCut(RequestError):
    """A stage cannot begin at a unit."""

    def __init__(self, message: str, *, start: int) -> None:
        super().__init__(message)
        self.start = start
        """The index of that unit, whatever the other stages begin with."""


class PassChanged(RunError):
    """A forward pass calls other units than on the example: by the module's own code, or by a mistake of the stages'."""


class StagedModule:
    """A module and where its stages begin.

    Args:
        model: each unit's ``forward`` is wrapped, in place.
        units: its chain of calls.
        starts: the index of each stage's first unit; the first is 0.
        dropout: of the model; without it, dropouts that units of several stages share draw other bits than in one process.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], starts: Sequence[int], *, dropout: DropoutKey | None = None
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.starts = tuple(starts)
        self.num_stages = len(starts)
        self.messages: list[tuple[int, ...]] = [()] * self.num_stages
        """Of each stage: which of its first unit's flat arguments come from the stage before."""
        self._stage_of_call = [sum(call >= start for start in starts) - 1 for call in range(len(units))]
        self._stand_ins = StandIns(dropout)
        self._unseen = set(range(len(starts)))
        """Stages that have not trained yet."""
        self._free: set[int] = set()
        """Calls of units without weights whose output depends on nothing but the inputs: every stage makes them for itself."""
        self._written: set[int] = set()
        """Stages that write to what they receive, as ``nn.ReLU(inplace=True)`` does: autograd wants a copy for that."""
        self._pass: Pass | None = None
        self._readers: dict[str, frozenset[int]] = {}
        """The stages whose results depend on each parameter, wherever the code that reads it stands."""
        self._whole = dict(model.named_parameters())
        self._last_stage = 0
        """Of the last pass that was begun."""
        paths = dict.fromkeys(unit.path for unit in units)
        self._before = [(one, dict(one.__dict__)) for one in (model, *map(model.get_submodule, paths))]
        # On the instances, where torch looks first, so that hooks of the model see the end of a pass that was left.
        model.__dict__["forward"] = functools.partial(self._run_model, model.forward)
        for path in paths:
            module = model.get_submodule(path)
            module.__dict__["forward"] = functools.partial(self._enter, path, module, module.forward)
            self._surround(module)

    def undo(self) -> None:
        """Leave the module as it was; of no use afterwards, and not once other stages were let go of."""
        for module, before in self._before:
            for name in ("forward", "_call_impl"):
                module.__dict__.pop(name, None)
                if name in before:
                    module.__dict__[name] = before[name]

    def stages_of(self, path: str) -> frozenset[int]:
        """The stages that call a unit."""
        return frozenset(self._stage_of_call[call] for call, unit in enumerate(self.units) if unit.path == path)

    def holders(self) -> dict[str, frozenset[int]]:
        """The stages that hold each parameter of the whole module; more than one where a weight is tied or read in several."""
        found: dict[int, frozenset[int]] = {}
        for path in dict.fromkeys(unit.path for unit in self.units):
            for parameter in self.model.get_submodule(path).parameters():
                found[id(parameter)] = found.get(id(parameter), frozenset()) | self.stages_of(path)
        # Somebody must save what nobody reads: the first.
        return {
            name: found.get(id(parameter), frozenset()) | self._readers.get(name, frozenset()) or frozenset({0})
            for name, parameter in self._whole.items()
        }

    def keep(self, stages: Collection[int]) -> dict[str, nn.Parameter]:
        """Let go of the weights of all other stages; those that stay, by their names in the whole module."""
        own = {name: self._whole[name] for name, holders in self.holders().items() if not holders.isdisjoint(stages)}
        paths = dict.fromkeys(unit.path for unit in self.units)
        elsewhere = [path for path in paths if self.stages_of(path).isdisjoint(stages)]
        for absent in keep_part(self.model, elsewhere=elsewhere, kept=own.values()):
            self._surround(absent)
        self._whole = {name: parameter for name, parameter in self._whole.items() if name in own}
        return own

    def run(
        self, stage: int, inputs: Sequence[Any], received: Received = (), weights: Mapping[str, Tensor] | None = None
    ) -> Any:
        """One stage's forward pass: the tensors for the next stage, or the model's output on the last.

        Args:
            stage: which.
            inputs: the model's own inputs, of which later stages read what does not depend on weights, such as a mask.
            received: what the stage before gave.
            weights: by parameter name, in place of the parameters.
        """
        with self._scanning(stage):
            arguments, output = self._forward(Pass(stage, received), inputs, weights)
        if arguments is not None:
            return tuple(arguments[place] for place in self.messages[stage + 1])
        if stage != self.num_stages - 1:
            unit = self.units[self.starts[stage + 1]].path
            raise PassChanged(
                f"the forward pass ended before it called {unit!r}, where stage {stage + 1} begins; "
                "a module that is cut must take the same way for every batch"
            )
        return output

    def _scanning(self, stage: int) -> AbstractContextManager[None]:
        """The first pass of every stage in training shows whether its code drops without a module."""
        if self._stand_ins.dropout is None or not self.model.training or stage not in self._unseen:
            return nullcontext()
        self._unseen.discard(stage)
        return self._stand_ins.dropout.scanning()

    def settle(self, example: Sequence[Any]) -> None:
        """Find out what each stage needs of the one before it, and prove on an example that the chain is the module.

        Raises:
            IllegalCut: something reaches a stage past the units at which it is cut, or what a stage is given cannot be sent;
                names the unit.
        """
        self.prove(example)
        self._find_readers(example)

    def prove(self, example: Sequence[Any]) -> None:
        """The part of ``settle`` that can fail.

        Raises:
            IllegalCut: as ``settle``.
        """
        # What fails here fails without any cut: its error is the module's own.
        with preserved_state(self.model, training=False), torch.no_grad():
            whole = call_model(self.model, example)
        try:
            self._prove(example, whole)
            return
        except Exception as error:
            if _is_final(error):
                raise
            # Stand-ins without memory cannot be written to. Whatever else it was comes again.
            self._stand_ins.has_memory = True
            self._free.clear()
        try:
            self._prove(example, whole)
        except Exception as error:  # The user's code may raise anything where it meets values that it does not expect.
            if _is_final(error):
                raise
            stage = max(1, self._last_stage)
            raise IllegalCut(
                f"stage {stage}, from {self.units[self.starts[stage]].path!r} on, cannot go through the code before it without "
                f"the values of earlier stages: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                start=self.starts[stage],
            ) from error

    def _prove(self, example: Sequence[Any], whole: Any) -> None:
        with preserved_state(self.model, training=False), torch.no_grad():
            self._find_free(example)
            for stage in range(1, self.num_stages):
                self.messages[stage] = self._probe(stage, example)
            received: Any = ()
            for stage in range(self.num_stages):
                given, writes = received, [tensor._version for tensor in received]
                # Before the pass that may write to what it is given.
                probed = [self._run_with(value, stage, example, given) for value in _PROBES]
                received = self.run(stage, example, given)
                self._refuse_other(stage, probed, received)
                self._refuse_message(stage + 1, received)
                if [tensor._version for tensor in given] != writes:
                    self._written.add(stage)
        if not are_same(whole, received):
            raise IllegalCut(
                "the stages one after another do not give what the module gives; cut it elsewhere",
                start=self.starts[-1],
            )

    def _probe(self, stage: int, example: Sequence[Any]) -> tuple[int, ...]:
        """Which arguments of a stage's first unit depend on units of other stages."""
        found: set[int] = set()
        seen: list[list[Any]] = []
        for value in (math.nan, *_PROBES):
            this = Pass(stage, None)
            arguments = self._filled(value, lambda this=this: self._forward(this, example)[0])  # type: ignore[misc]
            if arguments is None:
                unit = self.units[self.starts[stage]].path
                raise PassChanged(f"the forward pass ended before it called {unit!r}")
            found |= {place for place, given in enumerate(arguments) if has_no_value(given, this.stood_in)}
            seen.append(arguments)
        # NaN does not come through a comparison or a rounding; that two values give two results shows it.
        first, *others = seen
        found |= {place for other in others for place, given in enumerate(other) if not are_same(first[place], given)}
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

    def _find_readers(self, example: Sequence[Any]) -> None:
        """Which stages read a parameter outside its unit, or one that is in none, by whose gradients are there."""
        # Parameters that are not trained are read all the same.
        frozen = [value for value in self._whole.values() if not value.requires_grad and value.is_floating_point()]
        for parameter in frozen:
            parameter.requires_grad_()
        read = {name: parameter for name, parameter in self._whole.items() if parameter.requires_grad}
        found: dict[str, frozenset[int]] = dict.fromkeys(read, frozenset())
        try:
            with preserved_state(self.model, training=False), torch.enable_grad():
                received: Any = ()
                for stage in range(self.num_stages):
                    outputs = tree_leaves(self.run(stage, example, received))
                    sources = [leaf.sum() for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
                    grads = torch.autograd.grad(sources, list(read.values()), allow_unused=True) if sources else ()
                    for name, grad in zip(read, grads, strict=False):
                        if grad is not None:
                            found[name] |= {stage}
                    received = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        self._readers = found

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
                self._forward(Pass(self._stage_of_call[call] + 1, None), example)
            finally:
                hook.remove()
            if not outputs or any(has_no_value(value, ()) for value in tree_leaves(outputs)):
                self._free.discard(call)

    def _refuse_other(self, stage: int, probed: Sequence[Any], values: Any) -> None:
        """Refuse a stage whose result depends on what it did not receive."""
        is_missing = any(has_no_value(value, ()) for value in tree_leaves(values))
        if stage > 0 and (is_missing or not all(are_same(other, values) for other in probed)):
            unit = self.units[self.starts[stage]].path
            raise IllegalCut(
                f"stage {stage}, from {unit!r} on, reads something of an earlier stage that is no argument of {unit!r}; "
                "name places in pipeline.stages where all that is still needed goes through one call",
                start=self.starts[stage],
            )

    def _refuse_message(self, stage: int, values: Any) -> None:
        """Refuse what cannot be sent to a stage."""
        problem = message_problem(values) if stage < self.num_stages else None
        if problem is not None:
            raise IllegalCut(
                f"stage {stage}, from {self.units[self.starts[stage]].path!r} on, is given {problem}; begin it at another unit",
                start=self.starts[stage],
            )

    def _forward(
        self, this: Pass, inputs: Sequence[Any], weights: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Any] | None, Any]:
        """The flat arguments of the unit at which the pass was left, or its output at the end."""
        self._pass, self._last_stage = this, this.stage
        try:
            if weights is None:
                output = call_model(self.model, inputs)
            else:
                read = functools.partial(_reparametrize_module, self.model, dict(weights), tie_weights=True)
                with read(), surrounding(read):
                    output = call_model(self.model, inputs)
        finally:
            self._pass = None
        return (output.arguments, None) if isinstance(output, LeftOutput) else (None, output)

    def _run_model(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except LeavePass as left:
            # Returned and not raised further: torch calls no hook, not even one that is always called, when this is raised.
            return LeftOutput(left.arguments)

    def _surround(self, module: nn.Module) -> None:
        # torch's own name for a call with its hooks; there is no public way to be outside of hooks that are added later.
        module.__dict__["_call_impl"] = functools.partial(self._call, module._call_impl)

    def _call(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A call of a unit with its hooks; those of a unit that does not run here keep their state and send nothing."""
        this = self._pass
        if this is None or this.is_inside or this.call >= len(self.units) or self._runs(this, this.call):
            return original(*args, **kwargs)
        with silent():
            return original(*args, **kwargs)

    def _runs(self, this: Pass, call: int) -> bool:
        return self._stage_of_call[call] == this.stage or (
            call in self._free and self._stage_of_call[call] < this.stage
        )

    def _enter(self, path: str, module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        this = self._pass
        if this is None or this.is_inside:
            return original(*args, **kwargs)
        call, this.call = this.call, this.call + 1
        if call >= len(self.units) or self.units[call].path != path:
            expected = self.units[call].path if call < len(self.units) else "nothing more"
            raise PassChanged(
                f"the forward pass calls {path!r} where it called {expected!r} on the example; "
                "a module that is cut must take the same way for every batch"
            )
        stage = self._stage_of_call[call]
        this.is_inside = True
        try:
            if stage < this.stage and not self._runs(this, call):
                output = self._stand_in(call, original, args, kwargs, module.training)
                this.stood_in += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                return output
            if stage > this.stage or (call == self.starts[stage] and this.received is None and stage > 0):
                raise LeavePass(tree_leaves((args, kwargs)))
            if 0 < stage == this.stage:
                args, kwargs = self._receive(this, call, args, kwargs)
            return original(*args, **kwargs)
        finally:
            this.is_inside = False

    def _stand_in(self, call: int, original: Callable[..., Any], args: Any, kwargs: Any, is_training: bool) -> Any:
        try:
            return self._stand_ins.of(call, original, args, kwargs, is_training)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            mode = "training" if is_training else "evaluation"
            raise IllegalCut(
                f"{self.units[call].path!r} looks at values in its forward pass in {mode} ({error.func}), so later stages cannot "
                "know its shapes without running it; keep it in the last stage with pipeline.stages, or take that code out",
                start=self.starts[self._last_stage],
            ) from error

    def _receive(self, this: Pass, call: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a unit, with what came from the stage before in its place."""
        flat, form = tree_flatten((args, kwargs))
        if call == self.starts[this.stage]:
            assert this.received is not None
            messages, received = self.messages[this.stage], this.received
            if this.stage in self._written:
                received = [tensor.clone() for tensor in received]
            this.swapped = [(flat[place], tensor) for place, tensor in zip(messages, received, strict=True)]
        flat = [next((new for old, new in this.swapped if old is value), value) for value in flat]
        placed: tuple[Any, Any] = tree_unflatten(flat, form)
        return placed


def _is_final(error: Exception) -> bool:
    """True for an error of the cutting itself, right or wrong; False for one of the code that is cut.

    That code meets values here that it does not expect, and may then raise anything or take another way. An assertion or a name
    that fails in a line of these files is a mistake of ours, and must not pass for a cut that cannot be.
    """
    if isinstance(error, RequestError | RunError):
        return not isinstance(error, PassChanged)
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    is_here = Path(last.f_code.co_filename).parent == Path(__file__).parent
    return is_here and isinstance(error, AssertionError | LookupError | AttributeError | NameError)
