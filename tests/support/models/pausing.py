"""A tiny model that draws from every random generator of its process, and stands still where a test wants to kill it."""

import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Draws(nn.Module):
    """Adds noise from torch's, Python's and numpy's generators: a run that is resumed with other states ends elsewhere."""

    def forward(self, hidden):
        if not self.training:
            return hidden
        return hidden + 0.1 * torch.rand(hidden.shape[-1]) * (random.random() + np.random.rand())


class Hold(nn.Module):
    """Its process makes ``passes`` training passes, says so in a file ``held-*``, and waits for the file ``go``."""

    def __init__(self, folder: str, passes: int) -> None:
        super().__init__()
        self.folder, self.passes, self.num_passes = Path(folder), passes, 0

    def forward(self, tokens):
        if self.training:
            self.num_passes += 1
            if self.num_passes > self.passes and not (self.folder / "go").exists():
                (self.folder / f"held-{id(self)}").touch()
                while not (self.folder / "go").exists():
                    time.sleep(0.005)
        return tokens


def build(spec, folder, passes):
    return nn.Sequential(
        Hold(folder, passes),
        nn.Embedding(spec.vocab, 16),
        nn.Linear(16, 16),
        Draws(),
        nn.Dropout(0.1),
        nn.Linear(16, 16),
        Draws(),
        nn.Linear(16, spec.vocab),
    )
