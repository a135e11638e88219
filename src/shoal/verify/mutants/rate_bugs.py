"""Bugs of rates and batches that adapt, planted as those of ``planted_bugs.py`` are."""

from collections.abc import Sequence

from shoal.comm.world import World
from shoal.engine.callbacks import adapt
from shoal.engine.config import TrainConfig
from shoal.optim.adapt import HyperState, mean_square
from shoal.optim.config import OptimConfig
from shoal.trainer import loop, steprate
from shoal.verify.mutants.planted_bugs import Honest, Swap, replaces


def measure_own_gradients(world: World) -> list[Swap]:
    """The noise is that of this rank's own microbatches: the other replicas' are not looked at."""
    honest = mean_square

    def measure(squares: Sequence[float], weights: Sequence[float]) -> tuple[float, int]:
        each = len(squares) // world.size
        own = slice(world.rank * each, (world.rank + 1) * each)
        return honest(squares[own], weights[own])

    return [Swap(adapt, "mean_square", measure)]


@replaces(steprate, "growth_factor")
def keep_rate(honest: Honest, scale: str, ratio: float) -> float:
    """The batch grows, and the rate stays what it was."""
    return 1.0


@replaces(loop, "batch_at")
def grow_late(honest: Honest, train: TrainConfig, step: int, level: int = 0) -> int:
    """The batch grows one step late."""
    return int(honest(train, max(0, step - 1), level))


@replaces(adapt, "after_cosine")
def turn_cosine(honest: Honest, state: HyperState, cosine: float, config: OptimConfig) -> HyperState:
    """Hypergradient descent goes up: the rate grows where gradients turn back."""
    found: HyperState = honest(state, -cosine, config)
    return found
