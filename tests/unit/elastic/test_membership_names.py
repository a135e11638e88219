"""Two processes that want one name: the first keeps it while it lives, and the second gets it when it is dead."""

from shoal.elastic.changes import Joined, Report
from shoal.elastic.view import Member
from support.elastic.membership_tables import Center, old_view, running


def worker(id: str, origin: str, started: float = 0.0) -> Member:
    return Member(id=id, name="worker-0", role="worker", origin=origin, started=started)


def ask(center: Center, member: Member, view=None) -> list[str]:
    return center.do(Joined(member=member, now=center.now, view=view))


def contested() -> Center:
    center = running("a b", "x")
    assert ask(center, worker("w", "process 1"))[0].startswith("publish")
    return center


def test_the_second_is_turned_away_while_the_first_is_heard() -> None:
    center = contested()
    assert ask(center, worker("w2", "process 2", started=50.0)) == ["stall w2"]
    assert "worker-0' may be alive as process 1" in center.raw[0].reason
    # A sign of life that may have been on its way when the second asked says nothing.
    center.hear("w")
    assert ask(center, worker("w2", "process 2", started=50.0)) == ["stall w2"]
    assert center.wait(2, heard=["a", "b", "x", "w"]) == []
    assert ask(center, worker("w2", "process 2", started=50.0)) == ["refuse w2 taken"]
    assert "process 1 is worker-0 already, and was heard 0.0 s ago; end that one first" in center.raw[0].reason
    assert center.view == "3: a b / x w / a+b b+a", "the first was not touched"
    assert center.hear("w2") == ["refuse w2 taken"]


def test_the_second_is_let_in_when_the_first_is_silent_for_too_long() -> None:
    center = contested()
    assert ask(center, worker("w2", "process 2")) == ["stall w2"]
    told = center.wait(6, heard=["a", "b", "x"])
    assert told == ["publish 4: a b / x / a+b b+a", "release w", "collect worker w"]
    assert ask(center, worker("w2", "process 2")) == ["publish 5: a b / x w2 / a+b b+a"]
    # The first was only paused: now it is the one that comes second.
    assert center.hear("w") == ["refuse w departed"]
    assert ask(center, worker("w3", "process 1", started=90.0)) == ["stall w3"]


def test_the_second_is_let_in_at_once_when_the_first_is_said_to_be_dead() -> None:
    center = contested()
    assert ask(center, worker("w2", "process 2")) == ["stall w2"]
    center.leave("w")
    assert ask(center, worker("w2", "process 2")) == ["publish 5: a b / x w2 / a+b b+a"]


def test_a_process_that_comes_back_takes_its_own_place() -> None:
    center = contested()
    assert ask(center, worker("w2", "process 1", started=50.0))[:2] == [
        "refuse w replaced",
        "publish 4: a b / x w2 / a+b b+a",
    ]


def test_a_server_that_listens_where_the_other_did_takes_its_place() -> None:
    """Nobody can listen there while the other one does."""
    center = Center(servers=1)
    first = Member(id="a", name="server-0", role="server", address="tcp://10.0.0.4:7001", origin="process 1")
    ask(center, first)
    center.join("w")
    elsewhere = Member(id="b", name="server-0", role="server", address="tcp://10.0.0.5:7001", origin="process 2")
    assert ask(center, elsewhere) == ["stall b"]
    again = Member(id="c", name="server-0", role="server", address="tcp://10.0.0.4:7001", origin="process 3")
    assert ask(center, again)[0] == "refuse a replaced"


def test_a_new_center_hears_the_second_before_the_first() -> None:
    first, second = worker("w", "process 1"), worker("w2", "process 2", started=50.0)
    view = old_view(workers="")
    known = type(view)(**{**view.__dict__, "workers": (first,)})
    center = Center(epoch=9)
    assert ask(center, second) == [], "nobody has told of the run yet"
    a, b = known.servers
    ask(center, a, view=known), ask(center, b, view=known)
    assert ask(center, first, view=known) == ["refuse w2 taken", "publish 10: a b / w / a+b b+a"]
    # And the other way round: it was told of the first, and has not heard it.
    center = Center(epoch=9, reports=(Report(member=a, view=known),))
    assert ask(center, second) == ["stall w2"]
