"""Data parallelism: how gradients become the replicas' sum and weights come back, and the way by torch's DDP, made exact.

``Reduction`` is what a step asks of data parallelism, whatever the ZeRO stage::

    reduction.begin_step()
    for index, microbatch in enumerate(microbatches):
        with reduction.microbatch(is_last=index == last):
            objective(microbatch).backward()
    reduction.finish()          # every `updated` parameter now has the summed gradient of its rows in `.grad`
    clip, optimizer.step()      # over `updated`
    reduction.publish()         # the forward pass reads the new weights

DDP divides each gradient by the number of replicas, which is the global mean only while every replica has equally many
samples. Here each microbatch's loss is already its share of the global mean, so replicas are summed and nothing is divided:
unequal last batches and replicas without a sample come out right, and replicas add up bit for bit to what one process
computes. Between the ranks of one machine a bucket is summed through shared memory, in the order of ranks.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch types this name only there
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.channel import Channel
from shoal.comm.mesh import Mesh, inner_transport
from shoal.comm.torchgroup import TorchTransport
from shoal.core.placement import Placement, place_whole
from shoal.parallel.compressed import CompressedGradients, Compressing, shapes_of

NATIVE_BYTES = 1 << 20
"""The largest bucket that two ranks on two hosts sum by gloo's own all-reduce."""


class Reduction(Protocol):
    """One rank's part in it. Every method is called by all replicas together."""

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """What this rank's optimizer updates, by parameter name in the order of names: the parameter or some of its rows."""

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Where each of ``updated`` lies in its whole parameter."""

    @property
    def exchange(self) -> CompressedGradients | None:
        """Sums gradients by the plan's codec; None where they are summed as they are."""

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


def apply_data_parallel(
    objective: nn.Module, *, mesh: Mesh, device: torch.device, unused_parameters: bool
) -> DistributedDataParallel:
    """Wrap an objective so that its backward pass ends with gradients summed over ``mesh.replicas``.

    Args:
        objective: the module whose forward pass gives this replica's share of the loss.
        mesh: the ranks; those with the same weights (dp and cp) are summed over.
        device: where the weights are.
        unused_parameters: look for parameters that a step does not touch; costs a walk of the graph at every step.
    """
    wrapped = DistributedDataParallel(
        objective,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.group("replicas"),
        # Buffers are kept equal by the code that owns them (batch norm folds its statistics in a fixed order).
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=unused_parameters,
    )
    wrapped.register_comm_hook(mesh.replicas, _sum_bucket)
    return wrapped


def _sum_bucket(channel: Channel, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    total = bucket.buffer()
    inner, awaited = inner_transport(channel), _awaiting(channel, is_last=bucket.is_last())
    # One native sum that goes on by itself, where its order is the reference's or nobody can have that order. Between hosts only
    # of small buckets: of large ones it takes longer than the bytes do, of small ones less than to hand them to a thread.
    is_native = total.is_cuda or (channel.size <= 2 and (inner is channel.transport or total.nbytes <= NATIVE_BYTES))
    if is_native and isinstance(inner, TorchTransport):
        channel.traffic.note(channel.axis, "all_reduce", total.nbytes)
        work: Any = dist.all_reduce(total, group=inner.group, async_op=True)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()

        def take(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            awaited()
            return done.value()[0]

        return future.then(take)
    ready: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def end(failure: BaseException | None) -> None:
        if channel.overlaps:
            awaited()
        if failure is None:
            ready.set_result(total)
        else:
            # DDP waits for it at the end of the backward pass, and raises it there.
            error: Any = failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
            ready.set_exception(error)

    # Between hosts the next gradients are computed meanwhile.
    channel.start_all_reduce_(total).then(end)
    return ready


def _awaiting(channel: Channel, *, is_last: bool) -> Callable[[], None]:
    """To be called when a bucket's sum is there: DDP has waited for the last one, from when it had all gradients."""
    started_ns = time.perf_counter_ns()

    def awaited() -> None:
        if is_last:
            ended_ns = time.perf_counter_ns()
            channel.traffic.spent(
                channel.axis,
                "all_reduce",
                started_ns=started_ns,
                ended_ns=ended_ns,
                waited_ns=ended_ns - started_ns,
            )

    return awaited


class ReplicaReduction:
    """The reduction without ZeRO: every replica holds its parameters, gradients and optimizer state whole; DDP adds gradients.

    ``wrapped`` is the objective in its data-parallel wrapper, or bare where there is one replica or gradients are compressed.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        placements: Mapping[str, Placement],
        *,
        replicas: Channel | None = None,
        compressing: Compressing | None = None,
    ) -> None:
        named = sorted((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        self.wrapped = wrapped
        self.updated: dict[str, nn.Parameter] = dict(named)
        self.placements: dict[str, Placement] = {
            name: placements.get(name, place_whole(parameter.shape)) for name, parameter in named
        }
        self.exchange: CompressedGradients | None = None
        if compressing is not None:
            assert replicas is not None
            self.exchange = compressing.build(shapes_of(named), replicas)
        self._untouched: list[str] = []

    def begin_step(self) -> None:
        """See ``Reduction``. What ``zero_grad`` does, without its 0.1 ms for the profiler."""
        for parameter in self.updated.values():
            parameter.grad = None

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See ``Reduction``."""
        if isinstance(self.wrapped, DistributedDataParallel) and not is_last:
            return self.wrapped.no_sync()
        return nullcontext()

    def finish(self) -> None:
        """See ``Reduction``. DDP's last hook has waited already; what is compressed is summed here."""
        if self.exchange is not None:
            self._untouched = self.exchange.sum_parameters_(self.updated)

    def publish(self) -> None:
        """See ``Reduction``. The optimizer wrote where forward passes read."""

    def untouched(self) -> list[str]:
        """See ``Reduction``."""
        if self.exchange is not None:
            return self._untouched
        return [name for name, parameter in self.updated.items() if parameter.grad is None]

    def local(self) -> AbstractContextManager[None]:
        """See ``Reduction``. The caller runs the bare objective, which sums nothing; the sums of before are forgotten."""
        self.begin_step()
        return nullcontext()
