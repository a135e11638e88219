"""``shoal train --find-rate`` on one rank: losses of the recipe's model at learning rates that grow, in place of training."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shoal.data.loading.loader import StepBatch
from shoal.engine.batches.loading import Batches
from shoal.engine.callbacks.ratefinder import find_rate
from shoal.trainer.loop import Trainer

_LOW, _HIGH, _STEPS = 1e-6, 1.0, 100


def search_rate(trainer: Trainer) -> dict[str, Any]:
    """The rates that were tried, their losses and the rate that they speak for. All ranks call it together.

    The batches are those that the run would begin with, again and again over epochs.
    """
    loader = Batches(
        trainer.data.train,
        batch=lambda: trainer.batch,
        position=trainer.progress.position,
        micro_batch=trainer.setup.micro_batch,
        replica=trainer.mesh.replica,
        num_replicas=trainer.plan.num_shares,
        seed=trainer.settings.train.seed,
        prefetch=trainer.prefetch,
        workers=trainer.workers,
        world=trainer.world,
    )

    def batches() -> Iterator[StepBatch]:
        for place in range(1, _STEPS + 1):
            if trainer.stopped_by is not None:
                return
            trainer.reporter.enter("searching the rate", place)
            yield loader.next()

    try:
        curve = find_rate(trainer.engine, batches(), low=_LOW, high=_HIGH, num_steps=_STEPS)
    finally:
        loader.close()
    if trainer.stopped_by is not None:
        trainer.status = "interrupted"
    return {"rate_search": asdict(curve)}
