"""Elastic averaging: islands are drawn to a center, and the center to them (Zhang et al. 2015, arXiv 1412.6651, equations 5, 6).

At a round ``d_i = a (t_i - c)``, then ``t_i -= d_i`` and ``c += sum of d_i``, all from the values before it. Every island keeps
the center, which has the same bits everywhere; islands never agree, and the center is what is evaluated and saved.
"""

import torch
from torch import Tensor

from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import LEFT_OUT, sum_over_islands_, tell_shares
from shoal.replicas.policy import Island, PolicyState, StepEnd

DEFAULT_PULL = 0.9
"""Over the number of islands: what the paper calls beta."""


class ElasticAveraging:
    """A round every H steps."""

    is_agreed = False
    """See ``Policy``."""

    def __init__(self, island: Island, config: ReplicaConfig) -> None:
        self._island = island
        self._pull = DEFAULT_PULL / island.count if config.pull is None else config.pull
        self._center = island.copy_weights()
        self.left_out: tuple[int, ...] = ()
        """See ``Policy``."""

    def before_update(self) -> None:
        """See ``Policy``."""

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> bool:
        """See ``Policy``. An island that is left out is not drawn to the center, but put there."""
        self.left_out = ()
        if not end.is_round:
            return False
        weights, island = self._island.weights, self._island
        pulls = [(weight - self._center[name]).mul_(self._pull) for name, weight in weights.items()]
        is_in = island.is_finite(pulls)
        device = pulls[0].device if pulls else torch.device("cpu")
        share = 1.0 if is_in else LEFT_OUT
        self.left_out = tell_shares(island.channel, share, step=end.step, device=device).left_out
        for weight, pull in zip(weights.values(), pulls, strict=True):
            if is_in:
                weight.sub_(pull)
            else:
                pull.zero_()
        sum_over_islands_(pulls, island.channel)
        for center, pull in zip(self._center.values(), pulls, strict=True):
            center.add_(pull)
        for name, weight in weights.items() if not is_in else ():
            weight.copy_(self._center[name])
        return True

    @torch.no_grad()
    def restart(self) -> None:
        """See ``Policy``."""
        for name, weight in self._island.weights.items():
            self._center[name].copy_(weight)

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""

    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``: the center."""
        return {name: center.clone() for name, center in self._center.items()}

    def state(self) -> PolicyState:
        """See ``Policy``."""
        return PolicyState(shared={"center": self._center}, own={}, own_numbers={})

    def close(self) -> None:
        """See ``Policy``."""
