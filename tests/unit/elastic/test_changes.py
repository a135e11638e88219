"""Why a view of parameter servers was published, in words."""

import pytest

from shoal.elastic.changes import Elected, Failed, Joined, Left, Synced, Ticked, describe_change
from shoal.elastic.view import Chain, Member, View

SERVER = Member(id="s0", name="server-0", role="server", address="a")
WORKERS = [Member(id=f"w{number}", name=f"worker-{number}", role="worker", address="b") for number in range(2)]


def view(*workers, epoch=1):
    return View(epoch=epoch, servers=(SERVER,), workers=workers, chains=(Chain(primary="s0"),))


@pytest.mark.parametrize(
    ("before", "after", "event", "words"),
    [
        (None, view(), Ticked(now=1.0), "the first view"),
        (view(), view(), Elected(epoch=2, now=1.0), "another center was elected"),
        (view(), view(WORKERS[0]), Joined(member=WORKERS[0], now=1.0), "worker-0 joined"),
        (
            view(*WORKERS),
            view(WORKERS[0]),
            Left(id="w1", reason="it was killed", now=1.0),
            "worker-1 left: it was killed",
        ),
        (view(*WORKERS), view(WORKERS[1]), Ticked(now=1.0), "worker-0 left: no sign of life"),
        (view(WORKERS[0]), view(WORKERS[1]), Ticked(now=1.0), "worker-1 joined; worker-0 left: no sign of life"),
        (view(), view(), Synced(shard=0, server="s1", order=1), "shard 0 has another copy"),
        (view(), view(), Ticked(now=1.0), "shards were laid out anew"),
    ],
)
def test_a_change_is_told_by_who_came_and_who_went(before, after, event, words):
    assert describe_change(before, after, event) == words


def test_a_copy_that_does_not_follow_is_told_with_its_reason():
    event = Failed(shard=2, server="s1", reporter="s0", epoch=1, reason="it is slow", now=1.0)
    assert describe_change(view(), view(), event) == "a copy of shard 2 was given up: it is slow"
