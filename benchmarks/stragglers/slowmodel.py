"""A small GPT whose every forward pass takes a while, four times as long on one worker: for the benchmark beside."""

import sys
import time

from torch import Tensor, nn

from shoal.models.check import DataShape
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt

PASS_SECONDS = 0.06
SLOWED = "worker-0"


class Slow(nn.Module):
    """The model, and a sleep that stands for a device's time: on two cores four workers' arithmetic would be each other's."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model = model
        self.seconds = seconds

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        if self.training:
            time.sleep(self.seconds)
        return self.model(tokens)


def build(spec: DataShape, factor: float) -> nn.Module:
    """The model of this process; a role's command line says which worker it is."""
    config = GptConfig(layers=2, hidden=48, heads=4, kv_heads=2)
    is_slow = SLOWED in sys.argv
    return Slow(
        Gpt(config, vocab=spec.vocab or 0, sequence=spec.sequence or 0), PASS_SECONDS * (factor if is_slow else 1.0)
    )
