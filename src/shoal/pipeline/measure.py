"""What each unit of a chain costs, measured by running the module on an example."""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.pipeline.split import UnitCost
from shoal.pipeline.units import Unit
from shoal.pipeline.watch import FORWARDS_PER_STEP, Watch

NUM_TIMED = 3


def measure_costs(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> tuple[UnitCost, ...]:
    """Measure the units on an example: forward passes in training mode, of which nothing stays.

    A backward pass is not run: its time is taken as twice the forward's, and what it needs is seen when it is saved.

    Raises:
        RequestError: the pass in training does not call the units that were found.
    """
    watch = Watch(model, units, _now)
    with watch.watching():
        # The pass that warms up is the one that looks at what is saved.
        watch.run_saving(example)
        timed = [watch.run(example) for _ in range(NUM_TIMED)]
    return watch.costs([FORWARDS_PER_STEP * statistics.median(times) for times in zip(*timed, strict=True)])


def _now(tensors: Sequence[Tensor]) -> float:
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None:
        torch.accelerator.synchronize(device)
    return time.perf_counter()
