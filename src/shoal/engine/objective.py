"""A model and its loss as one module whose forward pass gives this microbatch's share of the global loss.

Wrapping both lets data parallelism see a single module. The outputs may be cut: along the vocabulary (tensor parallel) or along
the sequence (context parallel). With the losses that Shoal knows nothing is ever put together: each rank scores its part. A loss
of the user's own gets what it would get in one process, at the price of gathering it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.comm.channel import Channel
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RequestError, RunError, ShoalError
from shoal.core.plan import Plan
from shoal.data.batches.collate import settle_labels
from shoal.data.batchform import ModelInputs, Targets, batch_of, call_model, map_targets, targets_of
from shoal.data.loading.loader import Microbatch
from shoal.data.source import Splits
from shoal.engine.batches.empty import zero_of_parameters, zero_through_layers
from shoal.engine.metrics import StepMetrics
from shoal.engine.piggyback import StepScalars
from shoal.models.losses import (
    IGNORED,
    Correct,
    Loss,
    by_targets,
    count_correct,
    cross_entropy,
    loss_of_output,
    scores_of,
    with_scores,
)
from shoal.optim.precision import Precision
from shoal.parallel.apply import ModelLayout
from shoal.parallel.tensor.vocabulary import gather_logits, split_count_correct, split_cross_entropy
from shoal.randomness.dropout import DropoutKey
from shoal.telemetry.memory import is_out_of_memory


@dataclass(frozen=True)
class StepFunction:
    """``function(model, batch)`` gives the mean loss of a batch, or a dict with ``loss`` and metrics.

    ``batch`` has the form of the dataset's items, or the one that ``collate_fn`` gives it.
    """

    function: Callable[[nn.Module, Any], torch.Tensor | Mapping[str, Any]]
    """Of the model and a batch."""

    def read(self, found: Any) -> tuple[Any, dict[str, float]]:
        """The loss and the metrics of what the function returned.

        Raises:
            RunError: a dict without a loss, or a metric that is no number.
        """
        if not isinstance(found, Mapping):
            return found, {}
        if "loss" not in found:
            keys = ", ".join(repr(key) for key in found) or "nothing"
            raise RunError(f"the step returned a dict of {keys}; it must have the key 'loss'")
        metrics = {}
        for name, value in found.items():
            if name == "loss":
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                metrics[str(name)] = float(value.detach())
            elif isinstance(value, bool | int | float):
                metrics[str(name)] = float(value)
            else:
                shown = (
                    f"of the shape {tuple(value.shape)}"
                    if isinstance(value, torch.Tensor)
                    else f"a {type(value).__name__}"
                )
                raise RunError(
                    f"the step's metric {str(name)!r} is {shown}; return one number, the mean over the batch's items"
                )
        return found["loss"], metrics


def with_whole_passes(plan: Plan) -> Plan:
    """The plan with replicas in place of stages and of parts of a sequence."""
    return replace(plan, pp=1, cp=1, schedule=None, chunks=None, cp_kind="ring", dp=(plan.dp or 1) * plan.pp * plan.cp)


def refuse_step(plan: Plan) -> None:
    """Refuse a plan that runs no whole forward passes.

    Raises:
        RequestError: says why, and which plan can.
    """
    reasons = []
    if plan.pp > 1:
        reasons.append(
            f"pp={plan.pp} runs the forward pass in pieces on several ranks, and none could run a step of your own as a whole; "
            "give loss=function(output, batch) instead"
        )
    if plan.cp > 1:
        reasons.append(
            f"cp={plan.cp} gives every rank a part of the sequence, and a step of your own would see that part only; give "
            "loss=function(output, batch) instead"
        )
    if reasons:
        nearest = with_whole_passes(plan)
        raise RequestError(
            "\n".join(f"plan {str(plan)!r}: {reason}, or use the plan {str(nearest)!r}" for reason in reasons)
        )


def refuse_own_loss(plan: Plan) -> None:
    """Refuse to cut a sequence of which the model itself computes the loss.

    Raises:
        RequestError: says why, and which plan can.
    """
    nearest = replace(plan, cp=1, cp_kind="ring", dp=(plan.dp or 1) * plan.cp)
    raise RequestError(
        f"plan {str(plan)!r}: cp={plan.cp} gives every rank a part of the sequence, and the model computes its loss from whole "
        f"labels; give a loss of the output and the batch (model.loss, loss=), or use the plan {str(nearest)!r}"
    )


AnyLoss = Loss | StepFunction
"""What a model is trained on: a loss of its output, or a step that calls it."""


def is_known(loss: Loss | StepFunction) -> bool:
    """True for the cross entropy of this project, whose parts are known to add up."""
    return loss is cross_entropy or loss is by_targets


class Scoring:
    """How a microbatch's output becomes a loss on this rank."""

    def __init__(
        self, loss: Loss | StepFunction, *, layout: ModelLayout | None = None, mesh: Mesh | None = None
    ) -> None:
        self.step = loss if isinstance(loss, StepFunction) else None
        """The user's own step, which calls the model itself; None where a loss is made of the model's output."""
        self._given: Loss = loss_of_output if isinstance(loss, StepFunction) else loss
        self._is_known = is_known(self._given)
        self._context = layout.context if layout is not None else None
        self._split: Channel | None = None
        self._vocab = 0
        if layout is not None and layout.tensor is not None and layout.tensor.splits_logits:
            assert mesh is not None and layout.tensor.vocab is not None
            self._split, self._vocab = mesh.channel(Axis.TENSOR), layout.tensor.vocab
        self.factor = self._context.loss_factor if self._context is not None else 1.0
        """What this rank's loss is multiplied by, so that the ranks of one replica add up to the whole."""

    @property
    def has_whole_sequence(self) -> bool:
        """False where this rank scores a part of every sequence, and others the rest."""
        return self._context is None or not self._context.keeps_local

    def whole_scores(self, output: Any) -> Any:
        """The output with the scores of all choices, where ranks have some of them each. These ranks call it together."""
        if self._split is None:
            return output
        return with_scores(output, gather_logits(scores_of(output), channel=self._split, vocab=self._vocab))

    def own_part(self, targets: Targets, weight: float) -> tuple[Targets, float]:
        """The targets of this rank's positions, and the weight of those; all of them where the sequence is not cut."""
        # A microbatch that counts for nothing, such as one that only keeps a replica in step, does so on every rank.
        if self._context is None or not self._context.keeps_local or weight == 0:
            return targets, weight
        assert isinstance(targets, torch.Tensor), "a loss of several targets gets whole outputs"
        own = targets.index_select(1, self._context.positions(targets.shape[1]).to(targets.device))
        if own.is_floating_point():
            # A regression has no target that is left out, and every rank has equally many positions.
            return own, weight * own.shape[1] / targets.shape[1]
        return own, float((own != IGNORED).sum())

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """The mean over the targets that count, which are given in their form."""
        if self._split is None:
            return self._given(output, targets)
        if self._is_known:
            return split_cross_entropy(scores_of(output), targets, channel=self._split, vocab=self._vocab)
        return self._given(self.whole(output), targets)

    def whole(self, output: Any) -> Any:
        """A model's output with the scores of all ranks, as one process has it."""
        if self._split is None:
            return output
        return with_scores(output, gather_logits(scores_of(output), channel=self._split, vocab=self._vocab))

    @property
    def is_split(self) -> bool:
        """A rank has a part of the scores."""
        return self._split is not None

    @property
    def needs_own_loss(self) -> bool:
        """The loss is what the model computed, so whatever it is given must be read by it."""
        return self._given is loss_of_output and self.step is None

    def count_correct(self, output: Any, targets: Any) -> Correct | None:
        """How many targets have the highest score; None where that makes no sense."""
        if not isinstance(targets, torch.Tensor):
            return None
        if self._split is None:
            return count_correct(output, targets)
        return split_count_correct(scores_of(output), targets, channel=self._split, vocab=self._vocab)


class Objective(nn.Module):
    """``forward(microbatch, share)``: the mean loss of a microbatch, times its share of the global batch."""

    def __init__(
        self,
        model: nn.Module,
        scoring: Scoring,
        *,
        precision: Precision,
        device: torch.device,
        dropout: DropoutKey | None = None,
        scalars: StepScalars | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.scoring = scoring
        self.precision = precision
        self.device = device
        self.dropout = dropout
        self.scalars = scalars
        self.name_sample: Callable[[int], str] | None = None
        """How the user calls the sample with this id; None where nobody knows."""
        self.metrics = StepMetrics()
        """What the user's own step gives beside the loss."""
        self._has_gradient = False
        self._why_constant: str | None = None
        self._has_looked = False

    def forward(self, microbatch: Microbatch | None, share: float) -> torch.Tensor:
        """The microbatch's contribution to the global mean; ``None`` contributes zero to every parameter."""
        loss = zero_of_parameters(self.model) if microbatch is None else self._share_of_loss(microbatch, share)
        return loss if self.scalars is None else self.scalars.attach(loss)

    def _share_of_loss(self, microbatch: Microbatch, share: float) -> torch.Tensor:
        inputs, targets = self.prepare(microbatch)
        if self.scoring.step is not None:
            return self._share_of_step(microbatch, inputs, targets, share)
        with self.computing():
            output = call_model(self.model, inputs)
        return self.share_of(output, inputs, targets, microbatch, share)

    def _share_of_step(
        self, microbatch: Microbatch, inputs: ModelInputs, targets: Targets, share: float
    ) -> torch.Tensor:
        loss, metrics = self.call_step(batch_of(microbatch.form, inputs, targets))
        if microbatch.weight == 0:
            return self._nothing_of(loss)
        self.metrics.add(metrics, microbatch.weight)
        loss = loss if loss.dtype == torch.float64 else loss.float()
        return loss if share == 1.0 else loss * share

    def call_step(self, batch: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss and the metrics of the user's own step, which gets whole outputs of the model.

        Raises:
            RunError: it failed, or gave no loss.
        """
        step = self.scoring.step
        assert step is not None
        handle = None
        if self.scoring.is_split:
            handle = self.model.register_forward_hook(lambda _module, _args, output: self.scoring.whole(output))
        try:
            with self.computing():
                loss, metrics = step.read(step.function(self.model, batch))
        except ShoalError:
            raise
        except Exception as error:  # It is the user's own, and may raise anything.
            if is_out_of_memory(error):
                raise
            called = getattr(step.function, "__qualname__", type(step.function).__name__)
            raise RunError(
                f"the step {called} failed: {type(error).__name__}: {error}; its batch is {describe_value(batch)}; --debug shows "
                "where"
            ) from error
        finally:
            if handle is not None:
                handle.remove()
        return self._checked(loss, None), metrics

    def share_of(
        self, output: Any, inputs: ModelInputs, targets: Targets, microbatch: Microbatch, share: float
    ) -> torch.Tensor:
        """A microbatch's contribution to the global mean, from the model's output on prepared inputs."""
        targets, weight = self.scoring.own_part(targets, microbatch.weight)
        if weight == 0:
            return self._nothing_of(output)
        with self.precision.autocast(self.device.type):
            loss = self.call_loss(output, targets_of(microbatch.form, inputs, targets), microbatch)
        # In float32: a loss in float16 would overflow under the scale that is to save its gradients.
        loss = loss if loss.dtype == torch.float64 else loss.float()
        if weight != microbatch.weight:
            share = share * (weight / microbatch.weight)
        share = share * self.scoring.factor
        return loss if share == 1.0 else loss * share

    def call_loss(self, output: Any, targets: Any, microbatch: Microbatch | None = None) -> torch.Tensor:
        """The user's loss, or one message that shows both sides when they do not fit."""
        if not self._has_looked and microbatch is not None:
            self._has_looked = True
            self._refuse_unread(microbatch)
        try:
            loss = self.scoring.loss(output, targets)
        except ShoalError:
            raise
        except Exception as error:  # It is the user's own, and may raise anything.
            if is_out_of_memory(error):
                raise
            sides = f"the model's output is {describe_value(output)} and the targets are {describe_value(targets)}"
            label = ""
            if microbatch is not None and isinstance(error, IndexError):
                label = self._name_bad_label(output, microbatch)
            raise RunError(
                f"the loss failed: {type(error).__name__}: {error}; {label}{sides}; --debug shows where"
            ) from error
        return self._checked(loss, output)

    def _checked(self, loss: Any, output: Any) -> torch.Tensor:
        """A loss as one number that has a gradient, or zero by way of every layer where it has none."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise RunError(
                f"the loss returned {describe_value(loss)}; it must return one number as a tensor, the mean over its items"
            )
        if loss.grad_fn is None and torch.is_grad_enabled():
            # One microbatch may well have nothing to learn from, such as one without a triplet; a whole run may not.
            self._why_constant = self._why_constant or _without_gradient(output)
            return loss.detach().reshape(()) + self._nothing_of(output)
        self._has_gradient = self._has_gradient or torch.is_grad_enabled()
        return loss.reshape(())

    def _refuse_unread(self, microbatch: Microbatch) -> None:
        """Refuse a key of a dict that neither the model nor a loss reads: it is misspelt, or a loss is missing."""
        unread = () if microbatch.form is None else microbatch.form.unread(self.model)
        if unread and self.scoring.needs_own_loss:
            raise RunError(
                f"{type(self.model).__name__}.forward takes no {', '.join(map(repr, unread))}, which the samples have, and no "
                "loss is given that could read it; rename it, leave it out, or give a loss (model.loss, loss=)"
            )

    @property
    def why_constant(self) -> str | None:
        """Why nothing can be learnt from any loss so far, for people; None as soon as a parameter was behind one."""
        return None if self._has_gradient else self._why_constant

    def _name_bad_label(self, output: Any, microbatch: Microbatch) -> str:
        """Which sample's label is none of the classes that the model tells apart; empty where it cannot be seen."""
        targets = microbatch.targets
        if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return ""
        if targets.is_floating_point() or targets.ndim == 0:
            return ""
        is_last = output.shape[:-1] == targets.shape
        if not is_last and (output.ndim < 2 or output.shape[:1] + output.shape[2:] != targets.shape):
            return ""
        classes = output.shape[-1 if is_last else 1]
        wrong = ((targets < 0) | (targets >= classes)) & (targets != IGNORED)
        places = wrong.nonzero()
        if not len(places) or len(microbatch.sample_ids) != len(targets):
            return ""
        number = int(microbatch.sample_ids[int(places[0][0])])
        named = self.name_sample(number) if self.name_sample is not None else f"sample {number} of the train split"
        return f"{named} has the label {int(targets[tuple(places[0])])} and the model {classes} classes, 0 to {classes - 1}; "

    def prepare(self, microbatch: Microbatch) -> tuple[ModelInputs, Targets]:
        """Inputs and targets, on the device and in the run's precision."""

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return self.precision.cast_input(tensor.to(self.device, non_blocking=True))

        return microbatch.model_inputs.map(place), map_targets(microbatch.targets, place)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Surrounds a forward pass, or a part of one: arithmetic of the run's precision, and draws by key."""
        with self.precision.autocast(self.device.type), self._drawing():
            yield

    def _drawing(self) -> AbstractContextManager[None]:
        """Random draws of a training forward pass are by key, those of torch's functions too."""
        return self.dropout.drawing() if self.dropout is not None and self.training else nullcontext()

    def _nothing_of(self, output: Any) -> torch.Tensor:
        """Zero, by way of every layer, because a layer that waits for its peers must run backward too.

        Raises:
            RunError: there is nothing that could be trained.
        """
        zero = zero_through_layers(output)
        if zero is not None:
            return zero
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise RunError(_without_gradient(output))
        return zero_of_parameters(self.model)


def describe_value(value: Any) -> str:
    """A value of the user's as a message shows it: shapes and types, and what is around them."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(describe_value(item) for item in value) or 'nothing'}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(f'{key!r}: {describe_value(item)}' for key, item in value.items())}"
    return f"a {type(value).__name__}"


def _without_gradient(output: Any) -> str:
    """Why a loss that no parameter is behind cannot be trained on. Data parallelism would add up zeros, and say nothing."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if any(leaf.requires_grad for leaf in leaves):
        what = "the model's output depends on parameters and the loss does not"
    else:
        what = "already the model's output does not: it is detached, made under torch.no_grad, or all parameters are frozen"
    return (
        f"the loss depends on no parameter (it has no grad_fn), so nothing would be trained: {what}; look for .detach(), "
        ".item(), argmax, torch.no_grad or numpy between the parameters and the loss"
    )


def score_of(model: nn.Module, loss: Loss | StepFunction) -> Callable[[ModelInputs], Any]:
    """The loss of a plain model on inputs that have their labels among them."""

    def score(inputs: ModelInputs) -> Any:
        if isinstance(loss, StepFunction):
            return loss.read(loss.function(model, batch_of(inputs.form, inputs, ())))[0]
        return loss(call_model(model, inputs), targets_of(inputs.form, inputs, ()))

    return score


def settle_loss(loss: Loss | StepFunction | None, model: nn.Module, data: Splits) -> Loss | StepFunction:
    """The loss that is meant where none is given: what the targets say, or the model's own; data learns which labels it counts.

    Args:
        loss: as it is given.
        model: as one process builds it.
        data: what it will be trained on.
    """
    if loss is None or loss is by_targets:
        loss = by_targets if data.spec.has_one_target else loss_of_output
    settle_labels(model, data, score_of(model, loss))
    return loss


def kind_of(microbatch: Microbatch) -> Hashable:
    """Form, shapes and types of the inputs: what all ranks of a replica know of a microbatch alike."""
    return microbatch.form, tuple((tensor.shape, tensor.dtype) for tensor in microbatch.inputs)
