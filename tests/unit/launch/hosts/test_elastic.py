"""What the coordinator of several hosts tells them when replicas are lost: the real decisions, and lines that lead nowhere."""

import pytest

from shoal.core.plan import Plan
from shoal.elastic.config import GroupConfig
from shoal.launch.config import ProcessConfig
from shoal.launch.hosts import messages
from shoal.launch.hosts.connection import Connection
from shoal.launch.hosts.elastic import HostsGroup
from shoal.launch.hosts.hostspec import HostSlots
from shoal.trainer.elastic.membership import build_membership


class Line(Connection):
    """A line on which everything that is sent is kept."""

    def __init__(self, name, ranks):
        super().__init__(HostSlots(name=name, slots=len(ranks)), ranks)
        self.sent = []

    def send(self, message):
        if not self.lost:
            self.sent.append(message)


def start(*, min_dp=1, **hosts):
    """A group whose ranks have all come; on each host those of these numbers."""
    lines = [Line(name, ranks) for name, ranks in hosts.items()]
    num = sum(map(len, hosts.values()))
    policy = build_membership(
        GroupConfig(mode="shrink", min_dp=min_dp, rejoin=True), ProcessConfig(), Plan(dp=num), hosts=list(hosts)
    )
    told = []
    group = HostsGroup(
        policy, lines, generation=0, report=lambda event: None, tell=told.append, on_view=lambda epoch: None
    )
    for rank in range(num):
        said = messages.Said(generation=0, member=f"rank {rank}", is_ready=True, failed=0)
        group.said(said)
    return group, lines, told


def views(line):
    return [message.epoch for message in line.sent if isinstance(message, messages.Publish)]


def lose(group, line):
    line.lost = "its cable was pulled"
    assert group.host_lost(line)


def test_a_host_with_several_replicas_is_lost_in_one_view():
    group, (a, b), _ = start(a=(0,), b=(1, 2))
    lose(group, b)
    assert views(a) == [1, 3] and views(b) == [1] and group.present == [0]


@pytest.mark.parametrize("min_dp", [2, 3])
def test_a_host_without_which_too_few_are_left_leaves_the_others_waiting(min_dp):
    """Its replicas are told of one after the other: a view with those that are left was decided between, and is over."""
    group, (a, b), _ = start(min_dp=min_dp, a=(0,), b=(1, 2))
    lose(group, b)
    assert views(a) == [1] and group.gave_up is None
    new = Line("b", (1, 2))
    group.host_came(b, new)
    starts = [one.member for one in new.sent if isinstance(one, messages.StartMember)]
    assert len(starts) == 2
    for member in starts:
        group.said(messages.Said(generation=0, member=member, is_ready=True, failed=0))
    assert views(new) == views(a)[1:] and len(group.present) == 3
