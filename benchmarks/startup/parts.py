"""What the memory rows train: a transformer of 201 million parameters, built for all ranks at once or by each rank."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

HIDDEN, LAYERS, HEADS, SEQUENCE = 1024, 16, 8, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(rows).mean(1))


def shared() -> nn.Module:
    return Model()


def by_each_rank() -> nn.Module:
    # Ranks build by themselves what cannot be built before there are ranks, as all runs did before models were shared.
    if "SHOAL_RUN_DIR" in os.environ and "RANK" not in os.environ:
        raise RuntimeError("this model is built by ranks")
    return Model()


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, SEQUENCE, HIDDEN, generator=drawn), torch.arange(16) % 4)


class Mark(shoal.Hook):
    """Prints when this rank has its part of the model."""

    def on_attach(self, model: object) -> None:
        print(f"laid out at {time.time()}", flush=True)
