"""Exchanges between islands that go on beside steps: they use nothing that steps use, and what goes wrong with them is told."""

import os

import pytest
import torch

from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.replicas.build import build_policy
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.policy import Island, StepEnd
from shoal.testing.ranks import run_on_ranks

ELEMENTS = 1 << 20


def streaming(world, *, deadline_seconds=60.0):
    """A model of one parameter under streaming with a fragment that is applied two steps after it is sent."""
    world.deadline_seconds = deadline_seconds
    mesh = build_mesh(world, Plan.parse("islands=2 dp=1 sync=stream:3,1,2"))
    weights = {"weight": torch.full((ELEMENTS,), float(world.rank))}
    weights["weight"][0] = 0.0
    island = Island(
        channel=mesh.channel(Axis.ISLAND),
        weights=weights,
        seed=1,
        inside=mesh.everyone,
        background=mesh.add_background(world, Axis.ISLAND),
        rank=world.rank,
        deadline_seconds=deadline_seconds,
    )
    config = ReplicaConfig(outer_lr=1.0, outer_momentum=0.0, mixing=0.0)
    return mesh, weights["weight"], build_policy(island, SyncRule.parse("stream:3,1,2"), config, order=["weight"])


def end(step):
    return StepEnd(step=step, lr=0.1, is_round=False, samples=1)


def goes_on(world):
    """Island 1 sends only when island 0 has told it, over the channel of steps, that its own exchange is under way."""
    mesh, weight, policy = streaming(world)
    agreed = weight.clone()
    channel = mesh.channel(Axis.ISLAND)
    weight.sub_(1.0)
    if world.rank == 0:
        policy.after_update(end(2))
    found = []
    for step in range(3):
        # As steps do: were the exchange waited for, or did it go through this channel, nobody would come here.
        found.append(channel.all_reduce_(torch.full((5,), step + world.rank + 1.0)).sum().item())
    under_way = [not flight.has_arrived for flight, _ in policy._flights.values()]
    channel.all_reduce_(torch.zeros(1))
    if world.rank == 1:
        policy.after_update(end(2))
    policy.before_update()
    policy.after_update(end(3))
    changed = policy.after_update(end(4))
    expected = agreed - 1.0
    policy.close()
    mesh.close()
    return found, under_way, changed, bool(torch.equal(weight, expected))


def test_steps_go_on_while_a_fragment_is_under_way():
    first, second = run_on_ranks(goes_on, 2)
    assert first[0] == second[0] == [15.0, 25.0, 35.0]
    assert first[1] == [True] and second[1] == []
    assert first[2] and second[2] and first[3] and second[3]


def loses_peer(world, way):
    _, weight, policy = streaming(world, deadline_seconds=1.0 if way == "late" else 30.0)
    weight.sub_(1.0)
    if world.rank == 0:
        policy.after_update(end(2))
    if way == "dies" and world.rank == 1:
        world.barrier()
        os._exit(0)
    world.barrier()
    if world.rank == 1:
        # Comes to nothing: until the other has given up it holds its side open.
        world.barrier()
        return ""
    try:
        policy.after_update(end(4))
    except RunError as error:
        if way == "dies":
            raise
        world.barrier()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_island_that_does_not_come_is_named_with_the_round():
    told = run_on_ranks(loses_peer, 2, "late")[0]
    assert told.startswith("PeerLost: fragment 0 of the round that was sent after step 3, sent by rank 0: ")
    assert "rank 1" in told and "deadline of 1 s" in told


def test_an_island_that_died_is_named_with_the_round():
    with pytest.raises(RunError, match=r"PeerLost: fragment 0 of the round that was sent after step 3.*rank 1.*died"):
        run_on_ranks(loses_peer, 2, "dies")
