"""What a script does beside its run: refused, with the way to do it, where a plan would give wrong numbers without a word.

An update needs a new gradient of ``run.forward_backward``: the old one would be learnt from twice, and one of the script's own
``loss.backward()`` is, on several ranks, that of its replica alone. Gradients are those of one batch, of the parameters that were
trained when the model was laid out. A stage of a pipeline has no weights but its own, and shards are no state dict.
"""

import math
from typing import Any

import torch
from torch import nn

from shoal.comm.world import World
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.data.loading.loader import StepBatch
from shoal.library.setups import ModelSetup

_LATER = "to the optimizer as a group of its own with lr=0.0, and raise that group's lr when it is to be trained"


class Detours:
    """Watches over one model that is set up, and over its optimizer.

    Args:
        own: the model.
        world: the ranks.
        has_codec: weights are gathered by a codec under ZeRO.
    """

    def __init__(self, own: ModelSetup, world: World, *, has_codec: bool) -> None:
        self._own, self._world = own, world
        model, plan = own.engine.model, own.engine.plan
        # A parameter without a gradient counts as zeros under ZeRO, so that one that is frozen later would go on by its momentum.
        self._parameters = [
            (name, one, one.requires_grad)
            for name, one in model.named_parameters()
            if plan.zero > 0 or not one.requires_grad
        ]
        self._num_tensors = self._count_tensors()
        self._was_told = False
        self._watch_updates(world)
        if plan.pp > 1:
            self._refuse_calls(model, plan)
        if plan.pp > 1 or plan.tp > 1 or plan.zero > 0:
            self._refuse_states_of_shards()
        if plan.pp > 1 or plan.tp > 1 or plan.zero == 3:
            self._refuse_weights(model, f"under {plan} this rank holds parts of {type(model).__name__}'s weights")
        elif plan.zero > 0 and has_codec:
            self._refuse_weights(
                model,
                f"weights are gathered by a codec (compression.weights) under {plan}, so that {type(model).__name__} has what "
                "the codec made of the trained ones",
            )

    def before_pass(self, batch: StepBatch) -> str:
        """What to warn of before a batch goes through the model, or nothing.

        Raises:
            RequestError: something was trained or added since the model was set up, or gradients are meant to add up.
        """
        own, model = self._own, self._own.engine.model
        for name, one, was_trained in self._parameters:
            if one.requires_grad != was_trained:
                raise RequestError(_say_changed(f"parameter {name!r} of {type(model).__name__}", was_trained))
        if self._count_tensors() != self._num_tensors:
            raise RequestError(
                f"the {type(own.optimizer).__name__} got parameters after run.setup, which laid its groups out as the plan says; "
                f"give it all of them before. What is trained later goes {_LATER}"
            )
        is_forgotten = self._forgets_gradient(batch)
        own.last_batch = batch
        if not is_forgotten:
            return ""
        said = (
            "run.forward_backward(batch) forgets the gradient of the batch before, which no optimizer.step() has used: gradients "
            "are not added up over calls. Give run.loader all samples of an update as global_batch=, and what fits at once as "
            "micro_batch=, or say microbatches= in the plan; to leave a batch out, call optimizer.zero_grad() after it"
        )
        if own.num_updates == 0:
            raise RequestError(said)
        if self._was_told:
            return ""
        self._was_told = True
        return said

    def _forgets_gradient(self, batch: StepBatch) -> bool:
        """True where a pass over the batch throws a gradient away that was made to be learnt from.

        One that is not finite is not, nor one that the script forgot by itself, nor one of the same batch.
        """
        own = self._own
        if own.num_passes == own.passes_at_update or own.last_batch is None or own.last_batch is batch:
            return False
        known = [one for one in (own.last_loss, own.last_norm) if one is not None]
        if not known or not all(map(math.isfinite, known)) or own.is_overflown:
            return False
        # A rank may hold nothing but zeros of it, and none may go on into a pass that another one refuses.
        held = torch.tensor([int(own.holds_gradient(beside_zeros=True))], device=self._world.device)
        return bool(self._world.all_reduce_(held))

    def _count_tensors(self) -> list[int]:
        return [len(group["params"]) for group in self._own.optimizer.param_groups]

    def _watch_updates(self, world: World) -> None:
        own = self._own

        def refuse_own_gradient(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            makes_its_own = world.size == 1 and (args[1:] or kwargs)  # By a closure, which has not been called yet.
            if own.num_passes == own.passes_at_update and not makes_its_own:
                raise RequestError(
                    "optimizer.step() without a new run.forward_backward(batch) before it: run.step(batch) has its own "
                    "optimizer.step(), and a loss.backward() of the script's own would be the gradient of one replica; give "
                    "run.setup the loss, or step=, and call run.forward_backward(batch) or run.step(batch) once for each update"
                )
            if own.has_gradient and not makes_its_own and not own.is_overflown and not own.holds_gradient():
                raise RequestError(
                    "optimizer.step() finds no gradient: optimizer.zero_grad() was called after run.forward_backward(batch), "
                    "which forgets the batch before by itself; call zero_grad before it, or not at all"
                )

        own.optimizer.register_step_pre_hook(refuse_own_gradient)

    def _refuse_calls(self, model: nn.Module, plan: Plan) -> None:
        def refuse_call(*_: Any) -> None:
            if self._own.is_called_by_run:
                return
            raise RequestError(
                f"under {plan} this rank holds some stages of {type(model).__name__}, which cannot be called as a whole; use "
                "run.evaluate(...), or load run.state_dict(whole=True) into a model of your own"
            )

        model.register_forward_pre_hook(refuse_call)

    def _refuse_weights(self, model: nn.Module, why: str) -> None:
        def refuse(*_: Any) -> None:
            raise RequestError(
                f"{why}, which are no state dict; use run.state_dict(whole=True) for the whole, and "
                "shoal.load_weights(model, path) to load"
            )

        def refuse_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not keep_vars:  # Which is how Shoal itself goes through what a rank holds.
                refuse()

        model.register_state_dict_pre_hook(refuse_saving)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]

    def _refuse_states_of_shards(self) -> None:
        own, plan = self._own, self._own.engine.plan

        def refuse(*_: Any) -> None:
            raise RequestError(
                f"under {plan} this rank's {type(own.optimizer).__name__} holds the state of parts of tensors, which is no state "
                "dict; run.save() keeps the whole of it, and run.load() takes it up under any plan"
            )

        own.optimizer.register_state_dict_pre_hook(refuse)
        own.optimizer.register_load_state_dict_pre_hook(refuse)


def _say_changed(parameter: str, was_trained: bool) -> str:
    """What to say of a parameter that was frozen or unfrozen after it was laid out."""
    if was_trained:
        return (
            f"{parameter} was trained in run.setup and requires no gradient now, and its rows under ZeRO would go on by their "
            "momentum; to leave it as it is, set the lr of its group of the optimizer to 0.0"
        )
    return (
        f"{parameter} was frozen in run.setup and requires a gradient now; the optimizer was laid out without it and would never "
        f"change it. Do not freeze it before: give it {_LATER}"
    )
