"""Streaming DiLoCo: fragments of the model have rounds of their own, and what is sent is applied some steps later.

Fragment p of F is the parameters number p, p + F, p + 2F, ... (strided, so that each has early and late layers). Its change is
summed after the steps at which ``(step + 1 - p H / F) mod H`` is 0, and applied T steps later by DiLoCo's outer step; then an
island mixes ``t = f + a (t - f)``, which keeps a share of what it did meanwhile (Douillard et al. 2025, arXiv 2501.18512,
equations 2 and 3). With one fragment, no delay and a = 0 this is DiLoCo, bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import mean_weights
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import mean_over_islands_
from shoal.replicas.policy import Island, PolicyState


class Streaming:
    """Rounds of fragments. ``order`` names all parameters of the model, so that ranks with parts of it agree on fragments."""

    def __init__(self, island: Island, rule: SyncRule, config: ReplicaConfig, order: Sequence[str]) -> None:
        self._island, self._rule, self._config = island, rule, config
        place = {name: number for number, name in enumerate(order)}
        self._fragments = [
            [name for name in island.weights if place[name] % rule.fragments == fragment]
            for fragment in range(rule.fragments)
        ]
        self._agreed = island.copy_weights()
        self._momentum = {name: torch.zeros_like(weight) for name, weight in island.weights.items()}
        self._in_flight = {name: torch.zeros_like(weight) for name, weight in island.weights.items()}
        self.is_agreed = True
        """See ``Policy``: only where one fragment is the whole model and nothing is kept of an island's own."""

    def before_update(self) -> None:
        """See ``Policy``."""

    @torch.no_grad()
    def after_update(self, step: int, *, lr: float, is_round: bool) -> bool:
        """See ``Policy``. Which fragment is due follows from the step alone."""
        self.is_agreed = False
        changed = False
        for fragment, names in enumerate(self._fragments):
            # Counted from the fragment's first round on; a change that was never sent is never applied.
            since = step + 1 - fragment * self._rule.period // self._rule.fragments
            if since > 0 and since % self._rule.period == 0:
                self._send(names)
            applied = since - self._rule.delay
            if applied > 0 and applied % self._rule.period == 0:
                self._apply(names)
                changed = True
                self.is_agreed = self._agrees_at_rounds
        return changed

    def _send(self, names: Sequence[str]) -> None:
        for name in names:
            self._in_flight[name].copy_(self._agreed[name] - self._island.weights[name])
        mean_over_islands_([self._in_flight[name] for name in names], self._island.channel)

    def _apply(self, names: Sequence[str]) -> None:
        share, rate, mixing = self._config.outer_momentum, self._config.outer_lr, self._config.mixing
        for name in names:
            agreed, momentum, change = self._agreed[name], self._momentum[name], self._in_flight[name]
            momentum.mul_(share)
            momentum.add_(change)
            moved = momentum * share
            moved.add_(change)
            moved.mul_(rate)
            agreed.sub_(moved)
            weight = self._island.weights[name]
            if mixing == 0:
                weight.copy_(agreed)
            else:
                weight.copy_(agreed + (weight - agreed).mul_(mixing))

    @torch.no_grad()
    def restart(self) -> None:
        """See ``Policy``."""
        for name, weight in self._island.weights.items():
            self._agreed[name].copy_(weight)
            self._momentum[name].zero_()
            self._in_flight[name].zero_()
        self.is_agreed = True

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""
        self.is_agreed = after_round and self._agrees_at_rounds

    @property
    def _agrees_at_rounds(self) -> bool:
        return self._rule.fragments == 1 and self._rule.delay == 0 and self._config.mixing == 0

    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``: the mean of the islands' weights."""
        return mean_weights(self._island, is_agreed=self.is_agreed)

    def state(self) -> PolicyState:
        """See ``Policy``."""
        shared = {"agreed": self._agreed, "momentum": self._momentum, "in_flight": self._in_flight}
        return PolicyState(shared=shared, own={}, own_numbers={})
