"""One process, plain torch, the same global batches: what every plan is compared with.

Nothing of ``parallel/`` or ``pipeline/`` is imported here, and the process asserts it: a bug that both sides shared would be
equal on both. Gradients are added in the plan's tree: microbatches in order, one partial sum per replica, these in rank
order. Beside it stands the flat sum, one forward pass over the whole global batch, which has no weight, share or order in
common with it.
"""

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import RequestError
from shoal.data.build import build_splits
from shoal.data.config import DataConfig
from shoal.data.order import Position, permute, take
from shoal.data.source import Items, Source
from shoal.models.build import build_loss, build_model
from shoal.models.config import ModelConfig
from shoal.models.dropout import DropoutKey, apply_keyed_dropout
from shoal.optim.build import build_optimizer, initialise_state, set_rate
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.optim.rates import rate
from shoal.optim.rows import whole_norms
from shoal.verify.capture import Recorder, model_tensors, saved_buffers
from shoal.verify.case import Case, Tree
from shoal.verify.worker import serve

_FORBIDDEN = ("shoal.parallel", "shoal.pipeline")
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model ready to be trained in one process."""

    case: Case
    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    train: Source
    dropout: DropoutKey
    optim: OptimConfig
    optimizer: torch.optim.Optimizer
    precision: Precision
    device: torch.device

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, in the order of names."""
        return sorted((name, value) for name, value in self.model.named_parameters() if value.requires_grad)

    @property
    def has_batch_norm(self) -> bool:
        """True when a sample's loss depends on the samples beside it, so that a flat pass is another function."""
        return any(isinstance(module, _BatchNorm) for module in self.model.modules())


def run_reference(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Train ``case.steps`` steps and record each in ``folder``; says what was found on the way.

    Raises:
        RequestError: the model draws random numbers of its own, or its loss is not finite even here.
    """
    parts = build_parts(case)
    recorder = Recorder(folder, "reference")
    scale, position, flat_errors = parts.precision.first_loss_scale, Position(), []
    initial = {name: parameter.detach().clone() for name, parameter in parts.named}
    for step in range(case.steps):
        set_rate(parts.optimizer, rate(parts.optim, step, case.total_steps))
        taken, after = take(position, len(parts.train), case.global_batch)
        ids = permute(case.seed, position.epoch, len(parts.train), np.arange(taken.start, taken.stop))
        position = after
        flat = None if parts.has_batch_norm else flat_gradients(parts, step, ids, scale.scale)
        loss, gradients = tree_gradients(parts, step, ids, tree, scale.scale)
        if flat is not None:
            flat_errors.append(relative_distance(gradients, flat))
        norm = float(whole_norms(list(gradients.values())).square().sum().sqrt()) / scale.scale
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not finite and not (parts.precision.scales_loss and math.isfinite(loss)):
            raise RequestError(
                f"one process alone has loss {loss} and gradient norm {norm} at step {step + 1}: a proof needs finite numbers; "
                "lower optim.lr, or prove fewer steps"
            )
        captured = {f"grad/{name}": grad / scale.scale for name, grad in gradients.items()} if finite else {}
        if finite:
            _update(parts, gradients, norm, scale.scale)
        captured |= model_tensors(parts.named, parts.optimizer, saved_buffers(parts.model))
        recorder.add(loss=loss, norm=norm, skipped=not finite, tensors=captured)
        scale = scale.after_step(finite) if parts.precision.scales_loss else scale
    recorder.close(flat=max(flat_errors, default=None), movement=_movement(parts, initial))
    assert_alone()
    return {"flat": max(flat_errors, default=None)}


def build_parts(case: Case) -> Parts:
    """Model, data and optimizer, with the initial weights that the seed gives in one process."""
    model_config: Any = TypeAdapter(ModelConfig).validate_python(dict(case.model))
    data_config: Any = TypeAdapter(DataConfig).validate_python(dict(case.data))
    optim = OptimConfig.model_validate(dict(case.optim))
    precision = Precision.named(case.precision)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    data = build_splits(data_config, case.seed)
    # Initial weights are, under every plan, what build() gives under the seed in one process.
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    np.random.seed(case.seed % 2**32)
    model = build_model(model_config, data.spec).to(device=device, dtype=precision.weight_dtype)
    dropout = apply_keyed_dropout(model, case.seed)
    optimizer = build_optimizer(optim, model)
    initialise_state(optimizer)
    return Parts(
        case=case,
        model=model,
        loss=build_loss(model_config, data.spec),
        train=data.train,
        dropout=dropout,
        optim=optim,
        optimizer=optimizer,
        precision=precision,
        device=device,
    )


def tree_gradients(parts: Parts, step: int, ids: Ids, tree: Tree, scale: float) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of one global batch, added in the plan's tree; still multiplied by ``scale``."""
    cuts = np.array_split(ids, tree.replicas * tree.microbatches)
    own = tree.microbatches
    replicas = [[cut for cut in cuts[first : first + own] if len(cut)] for first in range(0, len(cuts), own)]
    if parts.case.batch_norm == "sync" and parts.has_batch_norm:
        # Statistics are those of microbatch i of all replicas together, so these run as one: there is then no tree to keep.
        rows = [[group[index] for group in replicas if index < len(group)] for index in range(own)]
        replicas = [[np.concatenate(row) for row in rows if row]]
    total = max(1.0, float(sum(parts.train.collate(cut).weight for group in replicas for cut in group)))
    sums: dict[str, Tensor] = {}
    loss: Tensor | None = None
    for group in replicas:
        parts.optimizer.zero_grad(set_to_none=True)
        partial = torch.zeros((), dtype=parts.precision.weight_dtype, device=parts.device)
        for cut in group:
            value = batch_loss(parts, step, cut, total)
            (value if scale == 1.0 else value * scale).backward()  # type: ignore[no-untyped-call]
            partial = partial + value.detach()
        own_grads = {name: _gradient(parameter) for name, parameter in parts.named}
        sums = {name: sums[name] + grad for name, grad in own_grads.items()} if sums else own_grads
        loss = partial if loss is None else loss + partial
    assert loss is not None
    return float(loss), sums


def flat_gradients(parts: Parts, step: int, ids: Ids, scale: float) -> dict[str, Tensor]:
    """The gradient of the mean over the whole global batch, in one pass."""
    parts.optimizer.zero_grad(set_to_none=True)
    weight = float(parts.train.collate(ids).weight)
    (batch_loss(parts, step, ids, max(1.0, weight)) * scale).backward()  # type: ignore[no-untyped-call]
    return {name: _gradient(parameter) for name, parameter in parts.named}


def batch_loss(parts: Parts, step: int, ids: Ids, total: float) -> Tensor:
    """The share of some samples in the global mean: their mean loss times their weight over the global batch's."""
    items: Items = parts.train.collate(ids)
    parts.dropout.begin(step, ids)
    inputs = [parts.precision.cast_input(tensor.to(parts.device)) for tensor in items.inputs]
    targets = parts.precision.cast_input(items.targets.to(parts.device))
    before = torch.get_rng_state()
    with parts.precision.autocast(parts.device.type):
        # As a run does it: the loss is outside, so that what it draws is seen below.
        with parts.dropout.drawing():
            output = parts.model(*inputs)
        loss = parts.loss(output, targets)
    foreign = parts.dropout.foreign_draws()
    if foreign:
        raise RequestError(
            f"the forward pass draws random numbers beside dropout, which depend on the number of processes, so no plan "
            f"can equal another: {'; '.join(foreign)}; draw with nn.Dropout, or turn it off for the proof with --set"
        )
    if not torch.equal(before, torch.get_rng_state()):
        _refuse_draws(parts.model, inputs, before)
    loss = loss if loss.dtype == torch.float64 else loss.float()
    return loss.reshape(()) * (items.weight / total)


def relative_distance(gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """How far two gradients are apart, over all tensors together, relative to the first."""
    apart = sum(float((gradients[name].double() - others[name].double()).square().sum()) for name in gradients)
    size = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    return math.sqrt(apart / size) if size > 0 else math.sqrt(apart)


def assert_alone() -> None:
    """Refuse to call this a reference if it has imported what it is to judge."""
    foreign = sorted(name for name in sys.modules if name.startswith(_FORBIDDEN))
    assert not foreign, f"the reference process imported {foreign}: it must not share code with what it proves"


def _update(parts: Parts, gradients: Mapping[str, Tensor], norm: float, scale: float) -> None:
    limit = parts.optim.clip
    shorten = limit / norm if limit is not None and norm > limit else 1.0
    for name, parameter in parts.named:
        parameter.grad = gradients[name]
        if shorten / scale != 1.0:
            parameter.grad = gradients[name] * (shorten / scale)
    parts.optimizer.step()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()


def _movement(parts: Parts, initial: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each weight went in all steps: a proof in which nothing moves proves nothing."""
    return {name: float((value.detach() - initial[name]).double().norm()) for name, value in parts.named}


def _refuse_draws(model: nn.Module, inputs: Sequence[Tensor], state: Tensor) -> None:
    """Find the innermost module whose forward moves torch's generator, and refuse it by name."""
    culprit = ""
    before: dict[str, Tensor] = {}
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            before[path] = torch.get_rng_state()

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            nonlocal culprit
            # Inner modules leave first, so the first one found is the innermost.
            if not culprit and not torch.equal(before[path], torch.get_rng_state()):
                culprit = path

        return hook

    for path, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(path)), module.register_forward_hook(leave(path))]
    torch.set_rng_state(state)
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    where = f"module {culprit!r}" if culprit else "the model or its loss"
    raise RequestError(
        f"{where} draws from torch's global generator in its forward pass, so its numbers depend on the number of processes and "
        "no plan can equal another; draw with nn.Dropout, or turn it off for the proof with --set"
    )


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    return run_reference(Case.from_values(job["case"]), Tree(**job["tree"]), Path(job["folder"]))


if __name__ == "__main__":
    serve(_run_job)
