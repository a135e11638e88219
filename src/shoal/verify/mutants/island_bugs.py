"""Bugs of replica policies that people met, or nearly met, in systems that have them, planted as those of ``planted_bugs.py``
are."""

from collections.abc import Sequence

from torch import Tensor

from shoal.comm.channel import Channel
from shoal.data import parts
from shoal.replicas import averaging, gossip, policy, streaming
from shoal.verify.mutants.planted_bugs import Honest, replaces


@replaces(averaging, "mean_over_islands_")
def sum_changes(honest: Honest, tensors: Sequence[Tensor], channel: Channel) -> None:
    """The sum of the islands' changes where their mean is due."""
    honest(tensors, channel)
    for tensor in tensors:
        tensor.mul_(channel.size)


@replaces(averaging, "mean_over_islands_")
def leave_out_last(honest: Honest, tensors: Sequence[Tensor], channel: Channel) -> None:
    """The last bucket is never exchanged, as torchft's bucketed path once did."""
    honest(tensors[:-1], channel)


@replaces(averaging.Averaging, "_nesterov")
def push_heavy_ball(
    honest: Honest, self: averaging.Averaging, name: str, agreed: Tensor, change: Tensor, lr: float
) -> None:
    """Heavy ball under the name of Nesterov: the agreed weights go by the momentum alone."""
    momentum = self._momentum[name]
    momentum.mul_(self._config.outer_momentum).add_(change)
    agreed.sub_(momentum * self._config.outer_lr)


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
def apply_late(honest: Honest, self: streaming.Streaming, step: int, *, lr: float, is_round: bool) -> bool:
    """Every fragment is sent and applied one step late."""
    changed: bool = honest(self, step - 1, lr=lr, is_round=is_round)
    return changed


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
