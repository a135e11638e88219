"""Several ``shoal.Trainer`` in one script: one after the other, and side by side."""

import torch
from torch import nn

from shoal import OptimConfig, TrainConfig, Trainer, from_datasets


def trainer(width):
    torch.manual_seed(width)
    data = [(torch.full((8,), index / 32), index % 3) for index in range(32)]
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
    config = TrainConfig(steps=4, global_batch=8, seed=width)
    return Trainer(model, from_datasets(data), loss=nn.CrossEntropyLoss(), train=config, optim=OptimConfig(lr=1e-2))


def test_trainers_side_by_side_end_where_each_ends_alone():
    """Their steps take turns, and neither changes what the other draws, learns or reports."""
    alone = []
    for width in (16, 24):
        with trainer(width) as one:
            losses = [info.loss for info in one.training_steps()]
            alone.append((losses, one.engine.hash_weights()))
    with trainer(16) as first, trainer(24) as second:
        both = list(zip(first.training_steps(), second.training_steps(), strict=True))
        found = [
            ([pair[place].loss for pair in both], one.engine.hash_weights())
            for place, one in enumerate((first, second))
        ]
    assert found == alone
