"""Elastic averaging: islands are drawn to a center, and the center to them (Zhang et al. 2015, arXiv 1412.6651, equations 5, 6).

At a round ``d_i = a (t_i - c)``, then ``t_i -= d_i`` and ``c += sum of d_i``, all from the values before it. Every island keeps
the center, which has the same bits everywhere; islands never agree, and the center is what is evaluated and saved.
"""

import torch
from torch import Tensor

from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import sum_over_islands_
from shoal.replicas.policy import Island, PolicyState

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

    def before_update(self) -> None:
        """See ``Policy``."""

    @torch.no_grad()
    def after_update(self, step: int, *, lr: float, is_round: bool) -> bool:
        """See ``Policy``."""
        if not is_round:
            return False
        pulls: list[Tensor] = []
        for name, weight in self._island.weights.items():
            pull = (weight - self._center[name]).mul_(self._pull)
            weight.sub_(pull)
            pulls.append(pull)
        sum_over_islands_(pulls, self._island.channel)
        for center, pull in zip(self._center.values(), pulls, strict=True):
            center.add_(pull)
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
