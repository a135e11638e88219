"""Runs that go wrong: a line fitted by a rate that is too high, in this process, and a batch that nobody should learn from."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.checkpoint.config import CheckpointConfig
from shoal.data.order import permute
from shoal.data.sources.own import from_datasets
from shoal.engine.config import TrainConfig
from shoal.optim.config import OptimConfig
from shoal.telemetry.config import TelemetryConfig
from shoal.trainer.loop import Trainer

BATCH = 4
SAMPLES = 256


def squared(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def line(spoilt=(), value=1000.0):
    """Samples near a line; the targets of those that the steps ``spoilt`` (counted from 1) learn from are ``value``."""
    inputs = torch.linspace(-1.0, 1.0, SAMPLES).unsqueeze(1)
    noise = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2))
    targets = 2.0 * inputs + noise
    for step in spoilt:
        positions = np.arange(BATCH * (step - 1), BATCH * step, dtype=np.int64)
        targets[torch.from_numpy(permute(1, 0, SAMPLES, positions))] = value
    return TensorDataset(inputs, targets)


def build(
    run_dir=None, *, lr, keep=1, every=1, steps=40, clip=None, warmup=0, resume=False, data=None, validation=(), **train
):
    """A trainer of one weight and one bias under plain sgd. Above a rate of about 1 the loss grows until it is no number."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return Trainer(
        nn.Linear(1, 1),
        from_datasets(line() if data is None else data, validation),
        loss=squared,
        train=TrainConfig(steps=steps, global_batch=BATCH, **train),
        optim=OptimConfig(name="sgd", lr=lr, clip=clip, warmup=warmup),
        checkpoint=CheckpointConfig(every=every, keep=keep),
        telemetry=TelemetryConfig(tensorboard=False),
        run_dir=run_dir,
        resume=resume,
        environment={},
    )


def names(run_dir):
    """What stands in the folder of checkpoints, by name."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
