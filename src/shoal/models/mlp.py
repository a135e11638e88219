"""A multi-layer perceptron, for digits, synthetic classes and regressions: the smallest model that trains for real."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.config import MlpConfig


class Layer(nn.Module):
    """Linear, optional batch norm, relu, dropout."""

    def __init__(self, config: MlpConfig, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, config.hidden)
        self.norm = nn.BatchNorm1d(config.hidden) if config.batch_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, inputs) to (B, hidden)."""
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        output: Tensor = self.dropout(F.relu(x))
        return output


class Mlp(nn.Module):
    """Features (B, ...) in, scores (B, outputs) out."""

    def __init__(self, config: MlpConfig, *, features: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [math.prod(features)] + [config.hidden] * (config.layers - 1)
        self.layers = nn.ModuleList(Layer(config, inputs) for inputs in widths)
        self.head = nn.Linear(config.hidden, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """A score per class, or the predicted numbers."""
        # Columns of whole numbers become numbers that a linear layer takes; others stay as they are, bit for bit.
        x = features.flatten(1) * 1.0
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores
