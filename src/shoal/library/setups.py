"""What ``run.setup`` was given and made: one model under the run's plan, with its optimizer and schedulers."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.comm.world import World
from shoal.core.codecrules import costly_ways
from shoal.core.errors import RequestError, RunError, ShoalError
from shoal.core.plan import Plan
from shoal.data.batchform import arguments_of
from shoal.data.loading.loader import StepBatch
from shoal.data.source import Source, Splits
from shoal.engine.callbacks.monitor import BestCheckpoint
from shoal.engine.config import TrainConfig
from shoal.engine.hooks import Hook
from shoal.engine.meancheck import find_other_mean
from shoal.engine.model import ParallelModel
from shoal.engine.objective import StepFunction, describe_value, with_whole_passes
from shoal.engine.state import hash_weights
from shoal.library.loader import RunLoader
from shoal.models.losses import Loss

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of torch around a model that is trained on several devices; by name, because importing the last takes seconds."""
_NAME = re.compile(r"[\w-]+")


class ModelSetup:
    """A model that is trained in a run.

    Args:
        engine: the model under the plan, with the script's own optimizer.
        schedulers: of the optimizer, in the order in which they were given.
        label: what it is called in checkpoints; empty for the first model of a run.
        data: what it is trained on.
    """

    def __init__(self, engine: ParallelModel, schedulers: Sequence[Any], label: str, data: Splits) -> None:
        self.engine = engine
        self.data = data
        self.schedulers = tuple(schedulers)
        self.label = label
        self.num_passes = 0
        """Batches that went through it, forward and backward; dropout is drawn by their number."""
        self.passes_at_update = 0
        """How many of them had gone when it was last updated."""
        self.num_updates = 0
        self.has_gradient = False
        """The newest pass left a gradient in the optimizer's tensors on this rank."""
        self.last_batch: StepBatch | None = None
        self.last_loss: float | None = None
        self.last_norm: float | None = None
        self.loss_scale = engine.precision.first_loss_scale
        """What the loss of the next pass is multiplied by; 1 for every precision but float16."""
        self.is_overflown = False
        """The gradient of the newest pass is not finite under its loss scale, so that the update after it is left out."""
        self._left_out: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._is_called = self._was_told = False
        if engine.precision.scales_loss:
            engine.optimizer.register_step_pre_hook(lambda *_: self._leave_out())

    def run_pass(self, batch: StepBatch) -> float:
        """Leave the gradient of a batch, without the loss scale, in the optimizer's tensors; returns the loss."""
        engine = self.engine
        try:
            loss = engine.forward_backward(batch, step=self.num_passes, loss_scale=self.loss_scale.scale)
        except ShoalError:
            raise
        except Exception as error:  # The model is the script's own, and may raise anything.
            if self.num_passes == 0:
                error.add_note(self._say_inputs(batch))
            raise
        self.has_gradient = self.holds_gradient()
        if engine.precision.scales_loss:
            self.is_overflown = not (math.isfinite(engine.unscale()) and math.isfinite(loss))
            self.loss_scale = self.loss_scale.after_step(not self.is_overflown)
        return loss

    def _say_inputs(self, batch: StepBatch) -> str:
        """With what the model was called in a batch."""
        model, parts = self.engine.model, batch.microbatches
        args, kwargs = arguments_of(model, parts[0].model_inputs) if parts else ((), {})
        shown = [*map(describe_value, args), *(f"{name}={describe_value(one)}" for name, one in kwargs.items())]
        return (
            f"{type(model).__name__} was called with {', '.join(shown) or 'nothing'}, as its data says. A dict of inputs is "
            "passed by keyword where the model's forward has parameters of these names"
        )

    def holds_gradient(self, *, beside_zeros: bool = False) -> bool:
        """True where any tensor of the optimizer has a gradient on this rank; with ``beside_zeros`` one that is not all zeros."""
        found = (one.grad for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None)
        return any(bool(one.any()) if beside_zeros else True for one in found)

    def leave_out(self, step: int, why: str) -> str:
        """What to say of a step that is not finite and is left out.

        Raises:
            RunError: the run has islands, of which the others would go on with other rates and numbers of steps.
        """
        if self.engine.islands is not None:
            raise RunError(f"step {step}: {why}, which a run with islands does not leave out")
        return f"step {step} was left out: {why}"

    def _leave_out(self) -> None:
        """Let an optimizer's step pass over all parameters, as torch passes over those that have no gradient."""
        if not self.is_overflown:
            return
        held = [one for group in self.optimizer.param_groups for one in group["params"]]
        self._left_out = [(one, one.grad) for one in held if one.grad is not None]
        for one, _ in self._left_out:
            one.grad = None

    def why_left_out(self) -> str:
        """Why the optimizer's step of a moment ago was left out, or nothing; gradients are then where they were."""
        for one, gradient in self._left_out:
            one.grad = gradient
        self._left_out = []
        if not self.is_overflown:
            return ""
        self.is_overflown = False
        self.passes_at_update = self.num_passes
        return f"an update was left out: its gradient overflowed; the loss scale is {self.loss_scale.scale:g} now"

    def why_not_finite(self, loss: float) -> str:
        """What to say, once, of a loss that is not finite and that the script's own update would learn from, or nothing."""
        if math.isfinite(loss) or self.is_overflown or self._was_told:
            return ""
        self._was_told = True
        return (
            f"the loss of batch {self.num_passes} is {loss}, and optimizer.step() would make weights of it; run.step(batch) "
            "leaves such steps out"
        )

    def longest_gradient(self, max_norm: object) -> float | None:
        """The norm that ``run.clip`` was given, where there is a gradient to clip by it.

        Raises:
            RequestError: it is no positive number, or the gradient was used already.
        """
        if max_norm is None:
            return None
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
            raise RequestError(
                f"max_norm={max_norm!r} is no longest norm; give a number above 0, or None to clip nothing"
            )
        if self.num_passes == self.passes_at_update:
            raise RequestError(
                f"run.clip({max_norm}) finds no new gradient to clip; call it after run.forward_backward(batch) and before "
                "optimizer.step()"
            )
        return float(max_norm)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Inside, it is the run that calls the model, not the script."""
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = False

    @property
    def is_called_by_run(self) -> bool:
        """True while the run calls the model."""
        return self._is_called

    @property
    def optimizer(self) -> Optimizer:
        """The script's own."""
        return self.engine.optimizer

    @property
    def lr(self) -> float:
        """The rate of the first group now."""
        return float(self.optimizer.param_groups[0]["lr"])


@contextmanager
def others_frozen(setups: Sequence[ModelSetup], own: ModelSetup) -> Iterator[None]:
    """Let a step of one model leave no gradient in the others that its loss may call: theirs come from their own steps alone."""
    if len(setups) == 1:
        yield
        return
    trained = [
        parameter
        for one in setups
        if one is not own
        for parameter in one.engine.model.parameters()
        if parameter.requires_grad
    ]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def notes_on(
    model: nn.Module,
    scored: Loss | StepFunction | None,
    optimizer: Optimizer,
    *,
    plan: Plan,
    train: TrainConfig,
    source: Source,
    others: Sequence[ModelSetup],
) -> Iterator[str]:
    """What to warn of before a model is set up: a loss that is no mean over samples, and a plan that costs more than it brings
    under its optimizer, where no other model has told of the same."""
    if not any(type(one.engine.optimizer) is type(optimizer) for one in others):
        yield from costly_ways(plan, type(optimizer).__name__)
    warning = None if scored is None else find_other_mean(model, scored, source, plan=plan, train=train)
    if warning:
        yield warning


def refuse_constant(own: ModelSetup) -> None:
    """Refuse a loss that no parameter is behind, after the first pass. All ranks call it together.

    Raises:
        RunError: says where to look.
    """
    why = own.engine.objective.why_constant
    own.engine.max_norm = None
    if own.engine.clip() == 0 and why is not None:
        raise RunError(why)


def refuse_sharing(setups: Sequence[ModelSetup], model: nn.Module, label: str, hooks: Iterable[Hook]) -> None:
    """Refuse a further model that has something in common with one that is set up, which each would change for itself.

    Raises:
        RequestError: names the parameter, the name or the hook, and what to do; or the plan cuts models, and says which can.
    """
    if not setups:
        return
    if (islands := setups[0].engine.islands) is not None:
        raise RequestError(
            f"islands with sync={islands.rule} are of one model, and one is set up; set the other up in a run of its own, or "
            f"leave sync out"
        )
    kind = type(model).__name__
    plan = setups[0].engine.plan
    if plan.pp > 1 or plan.cp > 1:
        why = (
            f"pp={plan.pp} leaves each rank some stages of a model, so that a pass of one could not call the other"
            if plan.pp > 1
            else f"cp={plan.cp} gives each rank a part of the sequence, so that a pass of one would show the other that part only"
        )
        raise RequestError(
            f"plan {str(plan)!r}: {kind} is model {len(setups) + 1} of this run, and {why}; several models are trained under dp, "
            f"zero and tp: use the plan {str(with_whole_passes(plan))!r}"
        )
    if any(setup.engine.model is model for setup in setups):
        raise RequestError(f"this {kind} is set up already; call run.setup once for each model, with its optimizer")
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    for setup in setups:
        theirs = {id(one) for one in setup.engine.model.parameters()}
        if shared := next((name for name, one in named if id(one) in theirs), None):
            raise RequestError(
                f"{kind} has the trained parameter {shared!r} of a {type(setup.engine.model).__name__} that is set up; a "
                "parameter belongs to one model: hold the other module in a list ([module]), which torch does not look into"
            )
    taken = {_labelled(name, setup.label) for setup in setups for name in setup.engine.outline}
    names = {_labelled(name, label) for name in model.state_dict()}
    if any(setup.label == label for setup in setups) or taken & names:
        raise RequestError(
            f"checkpoints would call {kind} {label!r} as they call a model, or a part of one, that is set up; give each model "
            "its own with run.setup(..., name=)"
        )
    for hook in hooks:
        if hook.state() or hook.tensors():
            raise RequestError(
                f"{type(hook).__name__} follows one model, and the hooks of the run are called for all; give it to that model: "
                f"run.setup(..., hooks=[{type(hook).__name__}(...)])"
            )


def _labelled(name: str, label: str) -> str:
    return f"{label}.{name}" if label else name


def sort_companions(companions: Sequence[Any], model: nn.Module) -> tuple[Optimizer | None, list[Any]]:
    """The optimizer and the schedulers among what stands beside a model in ``run.setup``.

    Raises:
        RequestError: there are two optimizers, something is neither, or a scheduler is of another optimizer.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        shown = given.__name__ if isinstance(given, type) else type(given).__name__
        raise RequestError(
            f"run.setup takes an nn.Module that is built, and was given {shown}; give it an object such as Net()"
        )
    if type(given).__name__ in _WRAPPERS and type(given).__module__.startswith("torch."):
        raise RequestError(
            f"run.setup takes the place of {type(given).__name__}, which would add gradients up a second time; give it the plain "
            "module inside (model.module), and the plan says how it is laid out: dp=2, or dp=2 zero=3"
        )
    optimizers = [one for one in companions if isinstance(one, Optimizer)]
    schedulers = [one for one in companions if not isinstance(one, Optimizer)]
    if len(optimizers) > 1:
        raise RequestError(
            f"run.setup was given {len(optimizers)} optimizers for one {type(model).__name__}; give its parameters to one "
            "optimizer in groups, or set up each model with its own"
        )
    for one in schedulers:
        if isinstance(one, type):
            raise RequestError(
                f"run.setup takes objects, and was given the class {one.__name__}; give it one such as "
                f"{one.__name__}({'model.parameters()' if issubclass(one, Optimizer) else 'optimizer'}, ...)"
            )
        if not (hasattr(one, "step") and hasattr(one, "state_dict")):
            fix = "give a loss by name, loss=...; " if callable(one) else ""
            raise RequestError(
                f"run.setup takes a model, its optimizer and its schedulers, and was given a {type(one).__name__}; {fix}a "
                "scheduler has step() and state_dict()"
            )
        held = getattr(one, "optimizer", None)
        if isinstance(held, Optimizer) and held not in optimizers:
            raise RequestError(
                f"the {type(one).__name__} is of another optimizer than the one it is set up with; make it from that one"
            )
    return (optimizers[0] if optimizers else None), schedulers


def refuse_words(data: object, name: object) -> None:
    """Refuse a loader and a name of a model that are none.

    Raises:
        RequestError: says what to give in their place.
    """
    if data is not None and not isinstance(data, RunLoader):
        raise RequestError(
            f"run.setup(data=) is a loader of the run, and was given a {type(data).__name__}; make one with run.loader(...)"
        )
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise RequestError(
            f"run.setup(name={name!r}) stands before names in checkpoints; give a word of letters and digits"
        )


def refuse_unkept(hooks: Iterable[Hook], *, has_folder: bool) -> None:
    """Refuse to keep the best checkpoint where there is no place for one.

    Raises:
        RequestError: says what to give.
    """
    if not has_folder and any(isinstance(one, BestCheckpoint) for one in hooks):
        raise RequestError(
            "BestCheckpoint keeps checkpoints, and this run has no run_dir; give shoal.Run(run_dir=) one"
        )


def refuse_functions(loss: object, step: object, *, has_optimizer: bool) -> None:
    """Refuse a loss and a step that cannot be called, or that nothing would be trained by.

    Raises:
        RequestError: says what to give in their place.
    """
    if loss is not None and step is not None:
        raise RequestError("run.setup was given a loss and a step, which has its own; leave one of them out")
    for name, one, form in (("loss", loss, "output, targets"), ("step", step, "model, batch")):
        if one is None:
            continue
        if isinstance(one, type) and issubclass(one, nn.Module):
            raise RequestError(f"{name}={one.__name__} is a class; give an object of it: {name}={one.__name__}()")
        if not callable(one):
            raise RequestError(f"{name}={one!r} is no function; give {name}=function({form})")
        if not has_optimizer:
            raise RequestError(
                f"run.setup was given a {name} and no optimizer; a model that is trained needs its optimizer beside it: "
                f"run.setup(model, optimizer, {name}=...)"
            )


def refuse_other_weights(model: nn.Module, world: World) -> None:
    """Refuse a model without values, and one that not every rank has built alike: replicas would train different models.

    Raises:
        RequestError: says what to do.
    """
    if unfilled := next((name for name, one in model.state_dict(keep_vars=True).items() if one.is_meta), None):
        raise RequestError(
            f"{unfilled!r} of {type(model).__name__} is on the meta device and has no values to lay out; build the "
            "model without torch.device('meta'), and load into it after run.setup: shoal.load_weights(model, path), of which "
            "each rank reads its part, or run.load()"
        )
    if world.size == 1:
        return
    digest = hashlib.sha256(hash_weights(model).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:7])], dtype=torch.int64, device=world.device)
    found = [int(one) for one in world.all_gather(own)]
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        raise RequestError(
            f"{type(model).__name__} has other weights on rank {others[0]} than on rank 0; build it inside `with "
            "shoal.Run(...)`, which seeds all ranks alike, or load the same weights on every rank before run.setup"
        )
