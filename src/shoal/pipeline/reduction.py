"""The reduction of a pipeline: gradients of a step are summed over stages that share a weight, then over replicas.

DDP cannot serve here: it sums in the backward pass of the module that it wraps, and a stage has no such pass. Sums are made
once, after the last cell, when every gradient is there; under ZeRO they are scattered to their shards at the same point.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from shoal.comm.channel import Channel
from shoal.comm.mesh import Mesh
from shoal.compression.config import CompressionConfig
from shoal.core.placement import Placement, place_whole
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.apply import ModelLayout
from shoal.parallel.compressed import CompressedGradients, Compressing, shapes_of
from shoal.parallel.zero.apply import ZeroReduction, apply_zero
from shoal.pipeline.build import Pipeline
from shoal.pipeline.share import SharedGradients

_BUCKET_BYTES = 32 << 20
"""A message is as large as this or one tensor: what is packed is held twice."""


class StageReduction:
    """See ``Reduction``.

    Args:
        own: this rank's trained parameters, by name in the order of names.
        shared: those that other stages hold too.
        replicas: ranks with the same stages and other data.
        placements: of parameters that tensor parallelism has cut.
        sharded: where ZeRO keeps state; None without it.
        allows_untouched: replicas tell each other which parameters got no gradient, and one that has none anywhere keeps none,
            as in one process; costs a number per parameter.
        compressing: how gradients are compressed where ZeRO does not do it; None where they are not.
    """

    def __init__(
        self,
        own: Mapping[str, nn.Parameter],
        shared: SharedGradients,
        *,
        replicas: Channel,
        placements: Mapping[str, Placement],
        sharded: ZeroReduction | None = None,
        allows_untouched: bool = False,
        compressing: Compressing | None = None,
    ) -> None:
        self._own = dict(own)
        self._shared = shared
        self._replicas = replicas
        self.sharded = sharded
        self._allows_untouched = allows_untouched
        self._untouched: list[str] = []
        self._exchange = None if compressing is None else compressing.build(shapes_of(self._own.items()), replicas)
        self._placements = {
            name: placements.get(name, place_whole(parameter.shape)) for name, parameter in self._own.items()
        }
        if sharded is not None:
            # They are summed by stage first; the store gets the total.
            sharded.gradients.apart = frozenset(shared.names)

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """See ``Reduction``."""
        return self._own if self.sharded is None else self.sharded.updated

    @property
    def exchange(self) -> CompressedGradients | None:
        """See ``Reduction``."""
        return self._exchange if self.sharded is None else self.sharded.exchange

    @property
    def placements(self) -> Mapping[str, Placement]:
        """See ``Reduction``."""
        return self._placements if self.sharded is None else self.sharded.placements

    def begin_step(self) -> None:
        """See ``Reduction``."""
        for parameter in self._own.values():
            parameter.grad = None
        self._shared.forget()
        if self.sharded is not None:
            self.sharded.begin_step()

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See ``Reduction``. A pipeline's backward passes are told apart by stage."""
        raise AssertionError("a pipeline calls stage()")

    @contextmanager
    def stage(self, stage: int) -> Iterator[None]:
        """Surrounds one backward pass of a stage."""
        around = nullcontext() if self.sharded is None else self.sharded.microbatch(is_last=False)
        with around, self._shared.stage(stage):
            yield

    def finish(self) -> None:
        """See ``Reduction``."""
        self._shared.finish()
        if self.sharded is None and self._exchange is not None:
            self._untouched = self._exchange.sum_parameters_(self._own)
            return
        if self.sharded is None:
            self._untouched = [name for name, parameter in self._own.items() if parameter.grad is None]
            sum_gradients_(self._own, self._replicas, allows_untouched=self._allows_untouched)
            return
        for name in self._shared.names:
            parameter = self._own[name]
            if parameter.grad is not None:
                self.sharded.gradients.put(name, parameter.grad)
                parameter.grad = None
        self.sharded.finish()

    @property
    def num_flag_bytes(self) -> int:
        """Of what replicas tell each other beside gradients."""
        is_told = self._allows_untouched and self.sharded is None and self._exchange is None and self._replicas.size > 1
        return sum(parameter.element_size() for parameter in self._own.values()) if is_told else 0

    def publish(self) -> None:
        """See ``Reduction``."""
        if self.sharded is not None:
            self.sharded.publish()

    def untouched(self) -> list[str]:
        """See ``Reduction``."""
        return self._untouched if self.sharded is None else self.sharded.untouched()

    def local(self) -> AbstractContextManager[None]:
        """See ``Reduction``."""
        self.begin_step()
        return nullcontext()


def reduce_stages(
    model: nn.Module,
    pipeline: Pipeline,
    *,
    plan: Plan,
    mesh: Mesh,
    analysis: ModuleAnalysis,
    layout: ModelLayout,
    unused_parameters: bool = False,
    compressing: Compressing | None = None,
    gathering: CompressionConfig | None = None,
) -> StageReduction:
    """The reduction of a model that was cut, with ZeRO or without; ``unused_parameters`` is the setting of that name."""
    trained = pipeline.trained
    sharded = None
    # A stage may have nothing to train, on all its replicas alike, and then nothing to shard.
    if plan.zero > 0 and trained:
        # More than one microbatch, whatever the plan says: gradients are kept whole until the step's last cell.
        sharded = apply_zero(
            model,
            analysis=analysis,
            mesh=mesh,
            stage=plan.zero,
            num_microbatches=2,
            placements=layout.placements,
            compressing=compressing,
            gathering=gathering,
        )
    return StageReduction(
        trained,
        pipeline.shared,
        replicas=mesh.replicas,
        placements=layout.placements,
        sharded=sharded,
        allows_untouched=unused_parameters,
        compressing=None if sharded is not None else compressing,
    )


def sum_gradients_(parameters: Mapping[str, nn.Parameter], channel: Channel, *, allows_untouched: bool = False) -> None:
    """Add gradients over the ranks of a channel, in the order of names, in messages of some megabytes.

    One that a rank does not have counts as zeros. With ``allows_untouched`` one that no rank has stays None.
    """
    if channel.size == 1 or not parameters:
        return
    grads = [parameter.grad for parameter in parameters.values()]
    # Another replica may have those that are missing here: messages must be of one size.
    summed = [
        torch.zeros_like(parameter) if grad is None else grad
        for grad, parameter in zip(grads, parameters.values(), strict=True)
    ]
    touched = summed[-1].new_tensor([grad is not None for grad in grads])
    _sum_in_buckets([*summed, touched] if allows_untouched else summed, channel)
    num_holders = touched.tolist() if allows_untouched else [1] * len(summed)
    for parameter, total, num in zip(parameters.values(), summed, num_holders, strict=True):
        parameter.grad = total if num else None


def _sum_in_buckets(grads: Sequence[Tensor], channel: Channel) -> None:
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (size + grad.nbytes > _BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            _sum_packed(bucket, channel)
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        _sum_packed(bucket, channel)


def _sum_packed(grads: list[Tensor], channel: Channel) -> None:
    if len(grads) == 1 and grads[0].is_contiguous():
        channel.all_reduce_(grads[0])
        return
    packed = channel.all_reduce_(torch.cat([grad.reshape(-1) for grad in grads]))
    for grad, total in zip(grads, torch.split(packed, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
