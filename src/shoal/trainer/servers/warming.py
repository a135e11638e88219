"""What every role of a run with servers needs, imported once before roles are forked (``elastic/cradle.py``)."""

from torch import nn

from shoal.optim.build import build_optimizer
from shoal.optim.config import OptimConfig
from shoal.trainer.servers import centering, closing, role, serving, working

WARMED = (centering, closing, role, serving, working)
"""Imported here for those who are forked."""


def warm_up() -> None:
    """Import what torch itself leaves for the first optimizer."""
    build_optimizer(OptimConfig(), nn.Linear(1, 1))
