"""Scalars that travel with the gradients: this rank's share of the loss, and its request to stop.

Every step sums both over all ranks. Where all ranks are replicas that hold everything they are piggybacked: they are the gradient
of a parameter of two zeros, so they are summed in a bucket that travels anyway. A collective of their own was measured to cost a
small step a millisecond. Elsewhere they are one small all-reduce after the last backward pass.
"""

import torch
from torch import Tensor, nn

from shoal.comm.carry import NOTHING, sum_rounds
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.engine.stop import StopRequest

RoundLosses = tuple[Tensor | float | None, ...]
"""A rank's share of a step's loss, in every round of the step; None in a round that left it nothing to compute."""
NUM_SCALARS = 2
"""This rank's share of the loss, and its request to stop."""


class StepScalars:
    """Sums the loss and the request to stop over the ranks of a step.

    Args:
        stop: of this rank.
        mesh: the ranks.
        dtype: of the sums; the same under every reduction, so that the reported loss has the same bits.
        device: where they are added.
    """

    def __init__(self, stop: StopRequest, *, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> None:
        self.stop = stop
        self.carrier: nn.Parameter | None = None
        """The parameter whose gradient carries the scalars; None where they are summed by themselves."""
        self._mesh, self._dtype, self._device = mesh, dtype, device

    def piggyback_on(self, objective: nn.Module) -> None:
        """Let the scalars travel with the gradients of a module, before data parallelism looks at its parameters."""
        self.carrier = nn.Parameter(torch.zeros(NUM_SCALARS, dtype=self._dtype, device=self._device))
        objective.register_parameter("piggyback", self.carrier)

    def begin_step(self) -> None:
        """Forget the last step's."""
        if self.carrier is not None:
            self.carrier.grad = None

    def attach(self, loss: Tensor) -> Tensor:
        """The loss, of the same value, whose backward pass leaves the scalars in the carrier's gradient."""
        if self.carrier is None:
            return loss
        scalars = torch.stack((loss.detach(), loss.new_tensor(float(self.stop.is_requested)))).to(self.carrier.dtype)
        return loss + (self.carrier * scalars).sum()

    def reduce(self, local_losses: RoundLosses, *, scale: float) -> float:
        """The loss over all ranks, after the gradients were summed; all ranks learn here whether one of them asks to stop.

        Args:
            local_losses: this rank's share of it, in every round.
            scale: what the loss was multiplied by for the backward pass.
        """
        if self.carrier is not None and self.carrier.grad is not None:
            loss, requests = (self.carrier.grad / scale).tolist()
        elif self._mesh.everyone.size == 1 and len(local_losses) == 1:
            loss, requests = self._told(local_losses[0]), float(self.stop.is_requested)
        else:
            told = [[self._told(local_loss), float(self.stop.is_requested)] for local_loss in local_losses]
            scalars = [torch.tensor(numbers, dtype=self._dtype, device=self._device) for numbers in told]
            loss, requests = sum_rounds(scalars, self._mesh.everyone).tolist()
        if self._mesh.has(Axis.ISLAND):
            # Other islands must stop after the same step: they are told of it when islands meet.
            self.stop.is_pending = self.stop.is_pending or requests > 0
        else:
            self.stop.agree(any_rank=requests > 0)
        return float(loss)

    def _told(self, local_loss: Tensor | float | None) -> float:
        """What this rank adds to the loss. Tensor-parallel ranks all have that of their replica: one of them tells it."""
        if local_loss is None:
            return NOTHING
        return float(local_loss) if self._mesh.coordinate(Axis.TENSOR) == 0 else 0.0
