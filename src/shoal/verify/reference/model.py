"""What one process trains with: model, data, optimizer, and how a step's samples are dealt out.

Nothing of ``parallel/``, ``pipeline/`` or ``paramserver/`` is imported here, and the process asserts it: a bug that both sides
shared would be equal on both. The cutting of a batch is written a second time for the same reason.
"""

import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.checkpoint.pretrained import Selection, load_module
from shoal.core.errors import RequestError, ShoalError
from shoal.data.batches.collate import settle_labels
from shoal.data.batchform import ModelInputs, arguments_of, call_model, map_targets, targets_of
from shoal.data.build import build_splits
from shoal.data.config import DataConfig
from shoal.data.loading.parts import build_order
from shoal.data.order import Position
from shoal.data.source import Items, Source
from shoal.models.build import build_model
from shoal.models.config import ModelConfig
from shoal.models.embeddings import make_dense, refuse_rows
from shoal.models.losses import build_loss
from shoal.optim.build import build_optimizer, freeze, initialise_state
from shoal.optim.config import OptimConfig
from shoal.optim.norms import whole_norms
from shoal.optim.precision import Precision
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout
from shoal.telemetry.memory import is_out_of_memory
from shoal.verify.reference.case import Case, Tree
from shoal.verify.reference.firstrate import with_first_rate

_FORBIDDEN = tuple(
    f"shoal.{room}." for room in ("parallel", "pipeline", "paramserver", "replicas", "compression", "engine")
)
_HOW_TO_GO_ON = (
    "draw with nn.Dropout or F.dropout, which have a key, or turn it off for the proof, as by --set model.args.NAME=0 where "
    "model.build takes such an argument; training does not need this"
)
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
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


def build_reference(case: Case) -> ReferenceModel:
    """Model, data and optimizer, with the initial weights that the seed gives in one process."""
    model_config: Any = TypeAdapter(ModelConfig).validate_python(dict(case.model))
    data_config: Any = TypeAdapter(DataConfig).validate_python(dict(case.data))
    optim = with_first_rate(OptimConfig.model_validate(dict(case.optim)), case.global_batch)
    precision = Precision.named(case.precision)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    data = build_splits(data_config, case.seed)
    # Initial weights are, under every plan, what build() gives under the seed in one process.
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    np.random.seed(case.seed % 2**32)
    model = build_model(model_config, data.spec).to(device=device, dtype=precision.weight_dtype)
    make_dense(model)
    freeze(model, optim)
    init = model_config.init
    if init is not None:
        chosen = Selection(
            strict=init.strict, prefix=init.prefix, rename=dict(init.rename), only=init.only, skip=init.skip
        )
        load_module(model, Path(init.path), chosen)
    refuse_rows(model)
    loss = build_loss(model_config, data.spec)

    def score(inputs: ModelInputs) -> Tensor:
        cast = inputs.map(lambda tensor: precision.cast_input(tensor.to(device)))
        return loss(call_model(model, cast), targets_of(cast.form, cast, ()))

    settle_labels(model, data, score)
    dropout = apply_keyed_dropout(model, case.seed)
    optimizer = build_optimizer(optim, model)
    initialise_state(optimizer)
    return ReferenceModel(
        case=case,
        model=model,
        loss=loss,
        train=data.train,
        dropout=dropout,
        optim=optim,
        optimizer=optimizer,
        precision=precision,
        device=device,
    )


def global_batches(parts: ReferenceModel, batch_of: Callable[[int], int] | None = None) -> Iterator[Ids]:
    """The samples of each step that is compared.

    Args:
        parts: the data and its order.
        batch_of: samples of a step, asked when it is its turn; left out, all have the case's.
    """
    position, case = Position(), parts.case
    order = build_order(parts.train, global_batch=case.global_batch, seed=case.seed)
    for step in range(case.steps):
        own = order if batch_of is None else replace(order, global_batch=batch_of(step))
        ids, _, position = own.take(position)
        yield ids


def cut_batch(ids: Ids, tree: Tree) -> list[list[Ids]]:
    """Each replica's microbatches, as many as the tree has; of a short batch the last ones are empty."""
    cuts = np.array_split(ids, tree.replicas * tree.microbatches)
    return [cuts[first : first + tree.microbatches] for first in range(0, len(cuts), tree.microbatches)]


def weigh(parts: ReferenceModel, ids: Ids) -> float:
    """What a microbatch weighs; an empty one nothing."""
    return float(parts.train.collate(ids).weight) if len(ids) else 0.0


def norm_of(gradients: Sequence[Tensor]) -> float:
    """The norm of several tensors together, from float64 sums; they come in the order of names."""
    return float(whole_norms(gradients).square().sum().sqrt()) if gradients else 0.0


def refuse_not_finite(loss: float, norm: float, step: int) -> None:
    """Refuse a case whose numbers are not finite even here.

    Raises:
        RequestError: says the numbers, the step and the fix.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise RequestError(
            f"one process alone has loss {loss} and gradient norm {norm} at step {step + 1}: a proof needs finite numbers; "
            "lower optim.lr, or prove fewer steps"
        )


def refuse_untouched(parts: ReferenceModel, names: Collection[str]) -> None:
    """Refuse a model that leaves a parameter without a gradient here, where nothing is lost on the way, if its plan cannot.

    Args:
        parts: the model and what its plan needs.
        names: of the parameters that one replica's samples gave no gradient.

    Raises:
        RequestError: names the parameter and the setting.
    """
    if names and parts.case.needs_every_gradient:
        raise RequestError(
            f"parameter {min(names)!r} got no gradient in this step, so gradients could not be summed over replicas; "
            "set train.unused_parameters=true, or take the parameter out of the model"
        )


def batch_loss(
    parts: ReferenceModel, step: int, ids: Ids, total: float, run: Callable[..., Any] | None = None
) -> Tensor:
    """The share of some samples in a mean: their mean loss times their weight over ``total``.

    Args:
        parts: the model and its loss.
        step: of dropout's key.
        ids: the samples.
        total: the weight of all samples that the mean is over.
        run: the model with other weights than its newest; left out, the model itself.
    """
    items: Items = parts.train.collate(ids)
    parts.dropout.begin(step, ids)

    def place(tensor: Tensor) -> Tensor:
        return parts.precision.cast_input(tensor.to(parts.device))

    inputs, targets = items.model_inputs.map(place), map_targets(items.targets, place)
    before = torch.get_rng_state()
    with parts.precision.autocast(parts.device.type):
        # As a run does it: the loss is outside, so that what it draws is seen below.
        with _refusing(parts, len(ids)), parts.dropout.drawing():
            args, kwargs = arguments_of(parts.model, inputs)
            output = (parts.model if run is None else run)(*args, **kwargs)
        if parts.dropout.draws_unused:
            # What the model draws is known to decide nothing; what the loss draws is not.
            before = torch.get_rng_state()
        loss = parts.loss(output, targets_of(items.form, inputs, targets))
    foreign = parts.dropout.foreign_draws()
    if foreign:
        raise RequestError(
            f"the forward pass draws random numbers beside dropout, which depend on the number of processes, so no plan "
            f"can equal another: {'; '.join(foreign)}; {_HOW_TO_GO_ON}"
        )
    if not torch.equal(before, torch.get_rng_state()):
        _refuse_draws(parts.model, inputs, before)
    loss = loss if loss.dtype == torch.float64 else loss.float()
    return loss.reshape(()) * (items.weight / total)


@contextmanager
def _refusing(parts: ReferenceModel, num_samples: int) -> Iterator[None]:
    """Refuse a model whose own forward pass fails in one process, where nothing is done to it: its code may raise anything.

    In float64 it may be an operation without that type, or a float32 in the code; elsewhere the number of samples, as of a batch
    norm that is given one.
    """
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        if parts.case.precision == "float64":
            raise RequestError(
                f"one process alone cannot run this model in float64: {what}; let the module follow the type of its weights, or "
                "prove it in float32 alone, with --dtype float32"
            ) from error
        raise RequestError(
            f"one process alone cannot run this model on a microbatch of {num_samples} samples: {what}; mend the module, or give "
            "it other microbatches by train.global_batch or the plan's microbatches"
        ) from error


def gradients_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    """What backward passes left at leaves, as tensors of their own; leaves that none reached are left out."""
    return [leaf.grad.detach().clone() for leaf in leaves if leaf.grad is not None]


def measure_movement(parts: ReferenceModel, initial: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each weight went in all steps: a proof in which nothing moves proves nothing."""
    return {name: float((value.detach() - initial[name]).double().norm()) for name, value in parts.named}


def assert_alone() -> None:
    """Refuse to call this a reference if it has imported what it is to judge."""
    foreign = sorted(name for name in sys.modules if name.startswith(_FORBIDDEN))
    assert not foreign, f"the reference process imported {foreign}: it must not share code with what it proves"


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
        call_model(model, inputs)
    for handle in handles:
        handle.remove()
    where = f"module {culprit!r}" if culprit else "the model or its loss"
    raise RequestError(
        f"{where} draws from torch's global generator in its forward pass, so its numbers depend on the number of processes and "
        f"no plan can equal another; {_HOW_TO_GO_ON}"
    )
