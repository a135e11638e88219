"""The reduction of a step in rounds: replicas that are present compute the shares of absent ones (``core/logical.py``).

    for round in rounds:
        for index, microbatch in enumerate(round):
            with reduction.microbatch(is_last=...):
                objective(microbatch).backward()
        reduction.end_round(...)        # adds this round's gradients to those of the rounds before, in the order of replicas
    reduction.finish()

Sums have the bits of a run in which nobody is absent (``comm/carry.py``). What it costs: a step takes as many times as long as it
has rounds, nothing is summed while the backward pass goes on, and every rank keeps whole gradients, the first one twice, at every
ZeRO stage too. It is for the time until the others are back.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.comm.carry import NOTHING, CarriedSum
from shoal.comm.channel import Channel
from shoal.core.placement import Placement
from shoal.parallel.compressed import CompressedGradients
from shoal.parallel.data import Reduction, ReplicaReduction
from shoal.parallel.zero.apply import ZeroReduction


@runtime_checkable
class LogicalReduction(Reduction, Protocol):
    """A reduction that is told when a round is over."""

    def end_round(self, *, is_empty: bool, is_last: bool) -> None:
        """Add the gradients of a round; in one that is empty for this rank, nothing of its own. All replicas call it together."""


class WholeRounds:
    """Without ZeRO; see ``LogicalReduction``.

    Args:
        whole: what is updated, without a wrapper that sums.
        objective: whose parameters get gradients: those of the model, and the scalars that travel with them.
        replicas: over whom gradients are summed.
        allows_untouched: a parameter that got no gradient from anybody keeps none, as under DDP.
    """

    def __init__(
        self, whole: ReplicaReduction, objective: nn.Module, replicas: Channel, *, allows_untouched: bool
    ) -> None:
        self._whole, self._replicas, self._allows_untouched = whole, replicas, allows_untouched
        self._summed = [parameter for _, parameter in sorted(objective.named_parameters()) if parameter.requires_grad]
        self._kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._summed:
            self._kinds.setdefault(parameter.dtype, []).append(parameter)
        self._sums: dict[torch.dtype, CarriedSum] = {}
        self._touched: Tensor | None = None
        self._untouched: set[str] = set()

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """See ``Reduction``."""
        return self._whole.updated

    @property
    def placements(self) -> Mapping[str, Placement]:
        """See ``Reduction``."""
        return self._whole.placements

    @property
    def exchange(self) -> CompressedGradients | None:
        """See ``Reduction``."""
        return None

    def begin_step(self) -> None:
        """See ``Reduction``."""
        self._whole.begin_step()
        self._sums = {dtype: CarriedSum(self._replicas) for dtype in self._kinds}
        self._touched = None
        self._untouched = set()

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See ``Reduction``. Nothing is summed before the round is over."""
        return self._whole.microbatch(is_last=is_last)

    def end_round(self, *, is_empty: bool, is_last: bool) -> None:
        """See ``LogicalReduction``."""
        if not is_empty:
            self._note_untouched()
        for dtype, parameters in self._kinds.items():
            packed = self._sums[dtype].add_(_pack(parameters, is_empty=is_empty))
            if is_last:
                parts = torch.split(packed, [parameter.numel() for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.grad = part.view_as(parameter)
        if not is_last:
            for parameter in self._summed:
                parameter.grad = None
        elif self._allows_untouched:
            self._drop_untouched()

    def finish(self) -> None:
        """See ``Reduction``. The last round has waited already."""

    def publish(self) -> None:
        """See ``Reduction``."""

    def untouched(self) -> list[str]:
        """See ``Reduction``. Of any share that this rank computed."""
        return sorted(self._untouched)

    def local(self) -> AbstractContextManager[None]:
        """See ``Reduction``."""
        return self._whole.local()

    def _note_untouched(self) -> None:
        self._untouched |= {name for name, parameter in self.updated.items() if parameter.grad is None}
        touched = torch.tensor([parameter.grad is not None for parameter in self._summed], dtype=torch.int32)
        self._touched = touched if self._touched is None else self._touched | touched

    def _drop_untouched(self) -> None:
        assert self._touched is not None, "everyone has a share in the first round"
        touched = self._replicas.all_reduce_max_(self._touched.to(self._summed[0].device))
        for parameter, is_touched in zip(self._summed, touched.tolist(), strict=True):
            if not is_touched:
                parameter.grad = None


def _pack(parameters: Sequence[nn.Parameter], *, is_empty: bool) -> Tensor:
    """The gradients one after another; what has none counts as zeros, and a share that is not there as nothing at all."""
    if is_empty:
        return parameters[0].detach().new_full((sum(one.numel() for one in parameters),), NOTHING)
    return torch.cat([_gradient(parameter).reshape(-1) for parameter in parameters])


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class ShardedRounds:
    """With ZeRO, whose store keeps whole gradients; see ``LogicalReduction``."""

    def __init__(self, sharded: ZeroReduction) -> None:
        assert sharded.gradients.keeps_whole, "a round is summed when it is over"
        self.sharded = sharded
        self._sums: list[CarriedSum] = []
        self._untouched: set[str] = set()

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """See ``Reduction``."""
        return self.sharded.updated

    @property
    def placements(self) -> Mapping[str, Placement]:
        """See ``Reduction``."""
        return self.sharded.placements

    @property
    def exchange(self) -> CompressedGradients | None:
        """See ``Reduction``."""
        return self.sharded.exchange

    def begin_step(self) -> None:
        """See ``Reduction``."""
        self.sharded.begin_step()
        self._sums = self.sharded.gradients.begin_rounds()
        self._untouched = set()

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See ``Reduction``. Nothing is summed before the round is over."""
        return self.sharded.microbatch(is_last=False)

    def end_round(self, *, is_empty: bool, is_last: bool) -> None:
        """See ``LogicalReduction``."""
        if not is_empty:
            self._untouched |= set(self.sharded.untouched())
        self.sharded.gradients.end_round(self._sums, is_empty=is_empty, is_last=is_last)

    def finish(self) -> None:
        """See ``Reduction``."""
        self.sharded.finish()

    def publish(self) -> None:
        """See ``Reduction``."""
        self.sharded.publish()

    def untouched(self) -> list[str]:
        """See ``Reduction``. Of any share that this rank computed."""
        return sorted(self._untouched)

    def local(self) -> AbstractContextManager[None]:
        """See ``Reduction``."""
        return self.sharded.local()
