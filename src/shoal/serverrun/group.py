"""How the ranks of a worker meet: a worker may be a group of processes that computes one gradient by a synchronous plan.

They meet in a file of the crew's folder and have a torch group of their own, of which no other worker is a part. A rank that does
not come is named; one that dies later is seen at once by whoever waits for it (``comm/rounds.py``), and is its worker's death.
"""

from dataclasses import replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.world import Place, World, join_world
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.engine.config import TrainConfig
from shoal.serverrun.member import MemberPlace


def group_plan(plan: Plan) -> Plan:
    """What the ranks of one worker do together: the plan without its servers, on one replica."""
    return replace(plan, dp=1, ps=0, workers=None, update=None, backup=0)


def share_of(train: TrainConfig, plan: Plan) -> TrainConfig:
    """What one worker sees of a step: its share of the batch."""
    return train.model_copy(update={"global_batch": train.global_batch // plan.num_shares})


def join_group(place: MemberPlace) -> World:
    """This process and the others of its worker; alone where a worker is one process.

    Raises:
        RunError: a rank of the group did not come.
    """
    size, cpu = place.plan.ranks_per_replica, torch.device("cpu")
    deadline = place.recipe.elastic.collective_deadline
    if size == 1:
        return World(Place(), device=cpu, deadline_seconds=deadline)
    store = FileStore(str(place.group_store), size)
    _meet(store, place, size, seconds=place.recipe.elastic.start_deadline)
    environment = {"RANK": str(place.group_rank), "WORLD_SIZE": str(size)}
    return join_world(environment, deadline_seconds=deadline, store=store, device=cpu)


def _meet(store: FileStore, place: MemberPlace, size: int, *, seconds: float) -> None:
    keys = [f"here-{rank}" for rank in range(size)]
    store.set(keys[place.group_rank], "1")
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        worker = place.name.partition(".")[0]
        raise RunError(
            f"rank {' and '.join(missing)} of the {size} ranks of {worker} did not come within {seconds:g} s; look at its log"
        ) from error
