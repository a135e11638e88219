"""A short run of one contender, for asking whether it comes to its end. In a file of its own: every rank loads it anew."""

import sys
from pathlib import Path

import torch

from shoal.comm.world import World

sys.path.insert(0, str(Path(__file__).resolve().parent))
from contenders import steps_of

STEPS = 6


def short_run(world: World, name: str) -> int:
    """Take the steps."""
    torch.set_num_threads(1)
    steps = steps_of(name, world, Path())
    for _ in range(STEPS):
        next(steps)
    return STEPS
