"""A small two-tower model with a loss over the global batch, in which bugs of gathered gradients show.

The reference process builds it too, so it imports nothing of what is proved.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.global_batch import all_gather


class TwoTowers(nn.Module):
    """Two networks that see half of the features each, and the temperature of their products (Radford et al. 2021)."""

    def __init__(self, features: int, width: int = 8) -> None:
        super().__init__()
        self.cut = features // 2
        self.left, self.right = nn.Linear(self.cut, width), nn.Linear(features - self.cut, width)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors of both sides, (B, width) each, and the temperature."""
        left, right = self.left(x[:, : self.cut]), self.right(x[:, self.cut :])
        return F.normalize(left, dim=-1), F.normalize(right, dim=-1), self.scale.exp()


def build(spec: object) -> TwoTowers:
    """The model for the data's features."""
    features = getattr(spec, "features", None)
    assert features is not None, "the data of this model are vectors"
    return TwoTowers(features[0])


def loss(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Every left side must find its right side among all of the global batch, and the other way round."""
    left, right = all_gather(output[0]), all_gather(output[1])
    scores = output[2] * left @ right.T
    own = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
