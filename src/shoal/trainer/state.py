"""Everything that changes while a run trains, and its form in a checkpoint.

Tensors (weights, optimizer state, random states) go into shards; the small rest is ``Progress``, a frozen value that prints
as JSON. A run that loads both takes the very step that it would have taken.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.core.errors import RunError
from shoal.data.order import Position
from shoal.optim.precision import LossScale
from shoal.optim.rates import PlateauState
from shoal.optim.state import export_state, import_state


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is; replaced, never changed, after each step."""

    step: int = 0
    position: Position
    loss_scale: LossScale = field(default_factory=LossScale)
    plateau: PlateauState = field(default_factory=PlateauState)
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    tokens: int = 0
    skipped: int = 0
    """Steps whose update was left out."""
    trained_seconds: float = 0.0

    def as_values(self) -> dict[str, Any]:
        """JSON for the manifest."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Any, *, origin: str) -> "Progress":
        """Back from the manifest's JSON.

        Raises:
            RunError: a field is missing, left over or impossible.
        """
        try:
            plain = dict(values)
            progress = cls(
                position=Position(**plain.pop("position")),
                loss_scale=LossScale(**plain.pop("loss_scale")),
                plateau=PlateauState(**plain.pop("plateau")),
                **plain,
            )
            counts = (progress.step, progress.tokens, progress.position.epoch, progress.position.offset)
            is_possible = (
                all(isinstance(count, int) and count >= 0 for count in counts) and progress.loss_scale.scale > 0
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{origin} does not say how far it was: {error!r}") from error
        if not is_possible:
            raise RunError(f"{origin} says that it was at an impossible place: {progress}")
        return progress


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, in the order of names; a tied tensor appears once, under its first name."""
    seen: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            found[name] = tensor.detach()
    return found


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over the weights in the order of their names, each as its little-endian bytes."""
    digest = hashlib.sha256()
    for tensor in named_weights(model).values():
        flat = tensor.cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def export_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the model and the optimizer, by checkpoint name."""
    tensors = {f"weights/{name}": tensor for name, tensor in named_weights(model).items()}
    if optimizer is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in export_state(optimizer, names).items()}
    return tensors


def import_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, origin: str) -> None:
    """Copy a checkpoint's weights into a model.

    Raises:
        RunError: names the first tensor that is missing, left over or of another shape.
    """
    wanted = named_weights(model)
    given = {name.removeprefix("weights/"): tensor for name, tensor in tensors.items() if name.startswith("weights/")}
    for name in sorted(wanted.keys() ^ given.keys()):
        side = "the model has no such tensor" if name in given else "the checkpoint has no such tensor"
        raise RunError(f"{origin} does not fit the model: {name!r}: {side}")
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            raise RunError(
                f"{origin} does not fit the model: {name!r} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            )
        tensor.copy_(given[name])


def import_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], *, origin: str
) -> None:
    """Copy a checkpoint's weights and optimizer state into a run's own.

    Raises:
        RunError: the checkpoint does not fit.
    """
    import_weights(model, tensors, origin=origin)
    names = {parameter: name for name, parameter in model.named_parameters()}
    prefix = "optimizer/"
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    import_state(optimizer, names, state)
