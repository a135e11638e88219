"""The leader of a group and the ranks that follow it, on real processes: nobody waits without end, and nobody ends too soon."""

import re

import pytest
import torch
import torch.distributed as dist

from shoal.comm.channel import PeerLost
from shoal.comm.mesh import build_mesh
from shoal.core.plan import Plan
from shoal.serverrun.worker.group import GroupLeader, follow
from shoal.serverrun.worker.worktimes import WorkTimes
from shoal.testing.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(120)
TENSOR = Plan(dp=1, tp=2)


def wait_for_signs(world, deadline):
    """The leader has nothing to do for longer than the deadline; the other counts what it hears meanwhile."""
    world.deadline_seconds = deadline
    channel = build_mesh(world, TENSOR).everyone
    told = torch.zeros(1, dtype=torch.int64)
    if world.is_first:
        leader = GroupLeader(None, None, channel, deadline_seconds=deadline)
        dist.recv(told, 1)
        leader.end()
        return int(told)
    heard, broadcast = [], channel.broadcast_

    def listen(tensor, source):
        found = broadcast(tensor, source)
        heard.append(int(found[0]))
        # More than there are in one deadline: without them it would be over by now.
        if len(heard) == 6:
            dist.send(torch.tensor([len(heard)]), 0)
        return found

    channel.broadcast_ = listen
    follow(None, None, channel, WorkTimes())
    return len(heard)


def test_a_leader_without_work_gives_signs_of_life():
    first, second = run_on_ranks(wait_for_signs, 2, 4.0, deadline_seconds=100)
    assert first == 6 and second >= 7


def be_silent(world, deadline):
    """The leader neither commands nor gives a sign."""
    world.deadline_seconds = deadline
    channel = build_mesh(world, TENSOR).everyone
    told = torch.zeros(1, dtype=torch.int64)
    if world.is_first:
        dist.recv(told, 1)
        return ""
    try:
        follow(None, None, channel, WorkTimes())
    except PeerLost as error:
        dist.send(told, 0)
        return str(error)
    return "it did not notice"


def test_a_leader_that_is_silent_is_named():
    _, said = run_on_ranks(be_silent, 2, 0.5, deadline_seconds=100)
    assert re.search(r"rank 0 \(pid \d+\) did not arrive within the deadline of 0.5 s: rank 1 waited", said), said
