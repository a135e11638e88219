"""A world without other processes: one rank of a plan is laid out, and takes its steps, as if its peers were there.

Every channel echoes what this rank gives it (``EchoTransport``) and counts it, so the traffic of a rehearsal is the traffic
that the rank will have, before any other process exists. torch's ``fake`` process group stands where torch itself wants one: DDP
cuts its buckets by looking at gradients, not at peers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend; torch has no public way

from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.core.place import Place


@contextmanager
def rehearsed_world(rank: int, size: int) -> Iterator[World]:
    """The world of one rank among ``size``, none of which is there but this one. On the CPU.

    Raises:
        RunError: this process is in a group of its own already.
    """
    if dist.is_initialized():
        raise RunError("a rehearsal needs a process that has joined no group")
    world = World(Place(rank=rank, world_size=size), device=torch.device("cpu"), deadline_seconds=60.0)
    world.is_rehearsed = True
    if size == 1:
        yield world
        return
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world.group = dist.group.WORLD
        yield world
    finally:
        world.group = None
        dist.destroy_process_group()
        # torch names the rank in front of every line of a traceback from then on; the rehearsed rank is nobody to blame.
        sys.excepthook = hook
