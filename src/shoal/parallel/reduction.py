"""How gradients become the replicas' sum and weights come back: what a step asks of data parallelism, whatever the ZeRO stage.

reduction.begin_step()
for index, microbatch in enumerate(microbatches):
    with reduction.microbatch(is_last=index == last):
        objective(microbatch).backward()
reduction.finish()          # every `updated` parameter now has the summed gradient of its rows in `.grad`
clip, optimizer.step()      # over `updated`
reduction.publish()         # the forward pass reads the new weights
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from shoal.comm.channel import Channel
from shoal.core.placement import Placement


class Reduction(Protocol):
    """One rank's part in it. Every method is called by all replicas together."""

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """What this rank's optimizer updates, by parameter name in the order of names: the parameter or some of its rows."""

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Where each of ``updated`` lies in its whole parameter."""

    def begin_step(self) -> None:
        """Forget the last step's gradients."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds one microbatch's forward and backward pass; sums over replicas happen in the last one only."""

    def finish(self) -> None:
        """Wait until ``updated`` has its gradients."""

    def publish(self) -> None:
        """Bring updated weights to where forward passes read them."""

    def untouched(self) -> list[str]:
        """Parameters that got no gradient in this step, on this rank; asked after ``finish``."""

    def local(self) -> AbstractContextManager[None]:
        """Surrounds one microbatch whose gradients are only to be looked at, by hooks: nothing is summed, none need stay."""


def sum_partial_(updated: Mapping[str, nn.Parameter], names: frozenset[str], channel: Channel) -> None:
    """Add up the gradients of which each rank of ``channel`` has only a part, in one message and in the order of names."""
    grads = [parameter.grad for name, parameter in updated.items() if name in names and parameter.grad is not None]
    if not grads:
        return
    packed = torch.cat([grad.reshape(-1) for grad in grads])
    channel.all_reduce_(packed)
    for grad, total in zip(grads, torch.split(packed, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
