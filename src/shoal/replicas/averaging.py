"""Policies with an agreed copy of the weights: an outer step on the mean change since the last round.

``f`` are the weights that islands agreed on last and ``t_i`` those of island i; a round computes ``D = mean of (f - t_i)``, in
the order of islands, steps ``f`` by it, and every island goes on from ``f``::

    local     f -= D                                      McMahan et al. 2017, arXiv 1602.05629, algorithm 1
    diloco    m = u m + D;  f -= o (D + u m)              Douillard et al. 2023, arXiv 2311.08105: Nesterov as torch has it
    slowmo    m = b m + D / lr;  f -= a lr m              Wang et al. 2020, arXiv 1910.00643, algorithm 1

The change is averaged and not the weights: the two differ in their last bits, and the change is what a codec can compress.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.core.syncrule import SyncRule
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import LEFT_OUT, Bucket, MeanChange, chunks, mean_over_islands_
from shoal.replicas.policy import Island, PolicyState, StepEnd

OuterStep = Callable[[str, Tensor, Tensor, float], None]
"""Changes the agreed weights in place: parameter name, agreed weights, mean change (turned into the weights), rate."""


class Averaging:
    """A round every H steps by one of the outer steps above."""

    def __init__(self, island: Island, rule: SyncRule, config: ReplicaConfig) -> None:
        self._island, self._rule, self._config = island, rule, config
        self._agreed = island.copy_weights()
        self._momentum: dict[str, Tensor] = {}
        if rule.kind in ("diloco", "slowmo"):
            self._momentum = {name: torch.zeros_like(weight) for name, weight in island.weights.items()}
        self._step: OuterStep = {"local": _take_mean, "diloco": self._nesterov, "slowmo": self._slow}[rule.kind]
        self._room = Bucket()
        self._samples = torch.zeros((), dtype=torch.int64)
        """Since the last round."""
        self.left_out: tuple[int, ...] = ()
        """See ``Policy``."""
        self.is_agreed = True
        """See ``Policy``."""

    def before_update(self) -> None:
        """See ``Policy``."""

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> bool:
        """See ``Policy``."""
        self.is_agreed, self.left_out = end.is_round, ()
        self._samples += end.samples
        if not end.is_round:
            return False
        # The change takes the place of the weights, which a round replaces anyway: no third copy of the model.
        changes = self._island.weights
        for name, weight in changes.items():
            torch.sub(self._agreed[name], weight, out=weight)
        by_samples = self._config.weigh == "samples"
        share = float(self._samples) if by_samples else 1.0
        mean = MeanChange(
            self._island.channel,
            share=share if self._island.is_finite(changes.values()) else LEFT_OUT,
            by_samples=by_samples,
            step=end.step,
            sums=self._island.sums,
            room=self._room,
        )
        sent = self._island.widen(changes)
        self.left_out = mean.finish(sent).left_out
        self._island.narrow_(sent, changes)
        self._samples.zero_()
        for name, change in changes.items():
            self._step(name, self._agreed[name], change, end.lr)
        return True

    def _nesterov(self, name: str, agreed: Tensor, change: Tensor, _lr: float) -> None:
        share = self._config.outer_momentum_of(self._rule.kind)
        for agreed_part, momentum, weight in chunks(agreed, self._momentum[name], change):
            step_nesterov_(agreed_part, momentum, weight, share=share, rate=self._config.outer_lr)
            weight.copy_(agreed_part)

    def _slow(self, name: str, agreed: Tensor, change: Tensor, lr: float) -> None:
        for agreed_part, momentum, weight in chunks(agreed, self._momentum[name], change):
            momentum.mul_(self._config.slow_momentum)
            momentum.add_(weight.div_(lr))
            agreed_part.sub_(torch.mul(momentum, self._config.slow_lr * lr, out=weight))
            weight.copy_(agreed_part)

    @torch.no_grad()
    def restart(self) -> None:
        """See ``Policy``."""
        for name, weight in self._island.weights.items():
            self._agreed[name].copy_(weight)
        for momentum in self._momentum.values():
            momentum.zero_()
        self._samples.zero_()
        self.is_agreed = True

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""
        self.is_agreed = after_round

    @torch.no_grad()
    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``. Between rounds that is the mean of the islands' weights."""
        return mean_weights(self._island, is_agreed=self.is_agreed)

    def state(self) -> PolicyState:
        """See ``Policy``."""
        momentum: Mapping[str, Mapping[str, Tensor]] = {"momentum": self._momentum} if self._momentum else {}
        return PolicyState(shared={"agreed": self._agreed, **momentum}, own={}, own_numbers={"samples": self._samples})

    def close(self) -> None:
        """See ``Policy``."""


def _take_mean(_name: str, agreed: Tensor, change: Tensor, _lr: float) -> None:
    for agreed_part, weight in chunks(agreed, change):
        agreed_part.sub_(weight)
        weight.copy_(agreed_part)


def step_nesterov_(agreed: Tensor, momentum: Tensor, change: Tensor, *, share: float, rate: float) -> None:
    """The outer step of DiLoCo, in place; every operation rounds once."""
    momentum.mul_(share)
    momentum.add_(change)
    moved = momentum * share
    moved.add_(change)
    moved.mul_(rate)
    agreed.sub_(moved)


@torch.no_grad()
def mean_weights(island: Island, *, is_agreed: bool) -> dict[str, Tensor]:
    """The mean of the islands' weights, as copies; where they agree, the weights: a mean of equal numbers may round."""
    found = island.copy_weights()
    if not is_agreed:
        mean_over_islands_(list(found.values()), island.channel)
    return found
