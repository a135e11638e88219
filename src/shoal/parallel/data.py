"""Data parallelism by torch's DDP, made exact.

DDP divides each gradient by the number of replicas, which is the global mean only while every replica has equally many
samples. Here each microbatch's loss is already its share of the global mean, so replicas are summed and nothing is divided:
unequal last batches and replicas without a sample come out right, and replicas add up bit for bit to what one process
computes. Between the ranks of one machine a bucket is summed through shared memory, in the order of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch types this name only there
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.channel import Channel, TorchTransport
from shoal.comm.mesh import Mesh


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
    if isinstance(channel.transport, TorchTransport):
        channel.ledger.note(channel.axis, "all_reduce", bucket.buffer().nbytes)
        work: Any = dist.all_reduce(bucket.buffer(), group=channel.transport.group, async_op=True)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])
    ready: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    ready.set_result(channel.all_reduce_(bucket.buffer()))
    return ready
