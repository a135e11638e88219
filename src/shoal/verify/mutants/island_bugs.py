"""Bugs of replica policies that people met, or nearly met, in systems that have them, planted as those of ``planted_bugs.py``
are."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from shoal.data.loading import parts
from shoal.replicas import averaging, exchange, gossip, policy, streaming
from shoal.verify.mutants.planted_bugs import Honest, replaces


@replaces(exchange.MeanChange, "messages")
def sum_changes(honest: Honest, self: exchange.MeanChange, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """The sum of the islands' changes where their mean is due."""
    yield from honest(self, changes)
    for change in changes.values():
        change.mul_(self._channel.size)


@replaces(exchange.MeanChange, "messages")
def leave_out_last(honest: Honest, self: exchange.MeanChange, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """The last bucket is never exchanged, as torchft's bucketed path once did."""
    yield from honest(self, dict(list(changes.items())[:-1]))


@replaces(averaging.Averaging, "_nesterov")
def push_heavy_ball(
    honest: Honest, self: averaging.Averaging, name: str, agreed: Tensor, change: Tensor, lr: float
) -> None:
    """Heavy ball under the name of Nesterov: the agreed weights go by the momentum alone."""
    momentum = self._momentum[name]
    momentum.mul_(self._config.outer_momentum_of(self._rule.kind)).add_(change)
    agreed.sub_(momentum * self._config.outer_lr)
    change.copy_(agreed)


@replaces(averaging.Averaging, "_nesterov")
def turn_change_round(
    honest: Honest, self: averaging.Averaging, name: str, agreed: Tensor, change: Tensor, lr: float
) -> None:
    """The outer gradient has the wrong sign."""
    honest(self, name, agreed, change.neg_(), lr)


@replaces(policy.Island, "copy_weights")
def keep_alias(honest: Honest, self: policy.Island) -> dict[str, Tensor]:
    """The agreed weights are the live ones, so no island ever sees a change."""
    return dict(self.weights)


@replaces(streaming.Streaming, "after_update")
def apply_late(honest: Honest, self: streaming.Streaming, end: policy.StepEnd) -> bool:
    """Every fragment is sent and applied one step late."""
    changed: bool = honest(self, replace(end, step=end.step - 1))
    return changed


@replaces(exchange.MeanChange, "messages")
def apply_unarrived(honest: Honest, self: exchange.MeanChange, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """A fragment is applied before it has arrived: what is found in its place is still this island's own change."""
    yield from honest(self, {name: change.clone() for name, change in changes.items()})


@replaces(averaging.Averaging, "_nesterov")
def average_twice(
    honest: Honest, self: averaging.Averaging, name: str, agreed: Tensor, change: Tensor, lr: float
) -> None:
    """The outer momentum is averaged over islands although all have the same: their number is divided out of it once more."""
    self._momentum[name].div_(self._island.count)
    honest(self, name, agreed, change, lr)


@replaces(gossip.Gossip, "_scale")
def forget_weight(honest: Honest, self: gossip.Gossip, factor: float) -> None:
    """The model is push-sum's numerator: nobody divides by w."""


@replaces(gossip, "mixing")
def keep_neighbours(
    honest: Honest, graph: str, count: int, round_number: int, *, seed: int, is_directed: bool
) -> list[list[float]]:
    """The neighbours of the first round, for ever."""
    found: list[list[float]] = honest(graph, count, 0, seed=seed, is_directed=is_directed)
    return found


@replaces(parts.Share, "island_samples")
def count_all_samples(honest: Honest, self: parts.Share, num_samples: int) -> int:
    """An island's mean loss is divided by the samples of all islands."""
    return num_samples
