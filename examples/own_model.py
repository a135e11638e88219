"""Your own module, loss and data under a recipe: `cd examples && shoal train own_model.toml --plan dp=2`."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """Points on two spirals; which one is each on?"""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        arm, angle = index % 2, torch.tensor(0.5 + 3.0 * (index // 2) / self.samples)
        turn = angle * 2 + arm * torch.pi
        return torch.stack((angle * turn.cos(), angle * turn.sin())) / 4, torch.tensor(arm)


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, label_smoothing=0.05)


def dataset(samples: int) -> Spirals:
    return Spirals(samples)
