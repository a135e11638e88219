"""What torch leaves for the first optimizer, done before processes are forked that will all need it (``launch/cradle.py``)."""

from torch import nn

from shoal.optim.build import build_optimizer
from shoal.optim.config import OptimConfig


def warm_up() -> None:
    """Make an optimizer: torch then imports its compiler, of which nobody here needs anything, for more than a second."""
    build_optimizer(OptimConfig(), nn.Linear(1, 1))
