"""A worker that takes several steps of its own for each portion, and pushes one direction (FedNova, ``paramserver/local.py``).

A portion stays what it is everywhere: one share of one step's samples, each sample once. A worker with tau local steps cuts it
into tau parts and takes one step on each, so a worker with more steps has smaller batches; it begins from the servers' weights.
What a portion comes to therefore depends on who did it, unlike everywhere else: give all workers the same ``local_steps`` where a
death must change no bit.
"""

import torch

from shoal.optim.rates import rate
from shoal.paramserver.answers import Portion
from shoal.paramserver.local import LocalSettings, train_locally
from shoal.serverrun.member import MemberPlace
from shoal.serverrun.portion import ShareResult
from shoal.serverrun.workline import Computed, Line, Worker


class LocalSteps:
    """Computes portions by local steps.

    Args:
        line: lands the servers' weights beside the model's.
        worker: what computes.
        place: whose settings.
    """

    def __init__(self, line: Line, worker: Worker, place: MemberPlace) -> None:
        config = place.recipe.paramserver
        self._line, self._worker, self._optim = line, worker, place.recipe.optim
        self._steps = config.own_steps(place.index)
        self._own_rate = config.own_rate(place.index)

    def __call__(self, portion: Portion) -> Computed:
        """This worker's direction for a portion.

        Raises:
            RunError: the steps led out of the finite numbers.
        """
        results: list[ShareResult] = []
        flat, shares = self._worker.flat, self._worker.shares

        def gradient_at(weights: torch.Tensor, step: int) -> torch.Tensor:
            flat.weights.copy_(weights)
            with torch.enable_grad():
                results.append(shares.run(portion.step, portion.share, part=step, num_parts=self._steps))
            return flat.collect_gradient()

        lr = self._own_rate or rate(self._optim, portion.step, self._worker.total_steps)
        found = train_locally(self._line.landing, gradient_at, LocalSettings(steps=self._steps, lr=lr))
        return Computed(result=ShareResult.joined(results), gradient=found.direction, steps=found.steps)
