"""What a step left behind, on disk: one safetensors file per step and one JSON page per process.

Tensors are named ``grad/NAME``, ``weight/NAME``, ``optimizer/NAME/KEY`` and ``buffer/NAME``. No pickle: the files come from other
processes. The reference and every rank write the same form, so one reader serves both; a rank adds where its pieces lie.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.core.placement import Patch, Placement

KINDS = ("loss", "grad", "norm", "optimizer", "weight", "buffer")
"""What is compared, in the order in which a wrong step goes wrong; the first difference is the first in this order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one process."""

    loss: float
    norm: float
    """Of the whole gradient, before clipping."""
    skipped: bool
    tensors: Mapping[str, Tensor]


@dataclass
class Recorder:
    """Writes the steps of one process into a folder."""

    folder: Path
    prefix: str
    numbers: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *, loss: float, norm: float, skipped: bool, tensors: Mapping[str, Tensor]) -> None:
        """Put down one step."""
        # Cloned where memory is shared (tied buffers, views of a bucket): safetensors refuses two names for one memory.
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, self.folder / f"{self.prefix}-step-{len(self.numbers)}.safetensors")
        self.numbers.append({"loss": loss, "norm": norm, "skipped": skipped})

    def close(self, **facts: Any) -> None:
        """Put down the numbers of all steps and whatever else there is to say."""
        page = {"steps": self.numbers, **facts}
        (self.folder / f"{self.prefix}.json").write_text(json.dumps(page))


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a recorder wrote, read step by step."""

    folder: Path
    prefix: str
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path, prefix: str) -> "Recording":
        """The recording of one process."""
        return cls(folder=folder, prefix=prefix, facts=json.loads((folder / f"{prefix}.json").read_text()))

    def __len__(self) -> int:
        return len(self.facts["steps"])

    def step(self, index: int) -> Step:
        """One step, with its tensors."""
        tensors = load_file(self.folder / f"{self.prefix}-step-{index}.safetensors")
        return Step(tensors=tensors, **self.facts["steps"][index])


def model_tensors(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights, optimizer state and buffers after a step, by the names that captures use."""
    found: dict[str, Tensor] = {f"buffer/{name}": tensor for name, tensor in buffers.items()}
    for name, parameter in named:
        found[f"weight/{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    return found


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds: running statistics and their like, not tables that the sizes decide."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def placement_values(placement: Placement) -> dict[str, Any]:
    """A placement as JSON."""
    return asdict(placement)


def read_placement(values: Mapping[str, Any]) -> Placement:
    """A placement back from JSON, whose lists become tuples again."""
    patches = tuple(
        Patch(
            local_start=tuple(patch["local_start"]),
            whole_start=tuple(patch["whole_start"]),
            shape=tuple(patch["shape"]),
        )
        for patch in values["patches"]
    )
    return Placement(
        whole_shape=tuple(values["whole_shape"]), local_shape=tuple(values["local_shape"]), patches=patches
    )
