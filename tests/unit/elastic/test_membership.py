"""Who is there, as the center sees it: the start of a run, workers that come and go, and members that are silent."""

from shoal.elastic.changes import Joined, Ticked
from shoal.elastic.view import Member
from support.elastic.membership_tables import Center, running


def test_a_view_when_all_servers_and_a_worker_are_there() -> None:
    center = Center(servers=2)
    assert center.first == [] and center.join("b") == [] and center.join("w") == []
    assert center.join("a") == ["publish 2: a b / w / a+b b+a"]
    assert center.join("x") == ["publish 3: a b / w x / a+b b+a"]
    assert center.join("a") == ["remind a of 3"], "asked twice: the answer was lost"


def test_servers_are_ordered_by_name_and_spare_ones_wait_for_work() -> None:
    center = Center(servers=3)
    for number in (10, 2, 1):
        center.join(f"s{number}", f"server-{number}")
    assert center.join("w") == ["publish 2: s1 s2 s10 / w / s1+s2 s2+s10 s10+s1"]
    assert center.join("s11", "server-11") == ["publish 3: s1 s2 s10 s11 / w / s1+s2 s2+s10 s10+s1"]


def test_too_few_servers() -> None:
    center = Center(servers=3)
    center.join("a")
    center.join("w")
    center.wait(29, "aw")
    assert center.wait(1, "aw") == ["refuse a over", "refuse w over", "give up"]
    assert center.raw[-1].reason == (
        "1 of 3 servers and 1 workers (at least 1) joined within 30 s: name-a, name-w; start the missing ones, or ask for fewer "
        "servers"
    )
    assert center.join("b") == ["refuse b over"] and center.wait(9) == []


def test_no_worker() -> None:
    center = Center(servers=1)
    center.join("a")
    assert center.wait(30, "a")[-1] == "give up" and "0 workers" in center.raw[-1].reason


def test_who_dies_before_the_start_does_not_count() -> None:
    center = Center(servers=2)
    center.join("a")
    center.join("w")
    center.wait(4, "w")
    center.leave("a")
    assert center.join("b") == []
    assert center.join("c") == ["publish 2: b c / w / b+c c+b"]


# ---- workers


def test_a_worker_dies_joins_and_returns() -> None:
    center = running("a b", "w x")
    assert center.leave("w") == ["publish 4: a b / x / a+b b+a", "release w", "collect worker w"]
    assert center.hear("w") == ["refuse w departed"]
    assert center.join("w") == ["refuse w departed"] and "killed by signal 9; it may join again" in center.raw[0].reason
    assert center.join("w2", "name-w") == ["publish 5: a b / x w2 / a+b b+a"]


def test_a_second_instance_id_releases_the_first() -> None:
    center = running("a b", "w")
    assert center.join("w2", "name-w") == [
        "refuse w replaced",
        "publish 3: a b / w2 / a+b b+a",
        "release w",
        "collect worker w",
    ]


def test_an_earlier_instance_id_that_is_heard_late() -> None:
    center = running("a b", "x")
    later = Member(id="w2", name="name-w", role="worker", started=20.0)
    center.do(Joined(member=later, now=center.now))
    earlier = Member(id="w1", name="name-w", role="worker", started=10.0)
    assert center.do(Joined(member=earlier, now=center.now)) == ["refuse w1 replaced"]


def test_the_last_worker_leaves() -> None:
    center = running()
    assert center.leave("w")[0] == "publish 3: a b /  / a+b b+a"
    assert center.join("x") == ["publish 4: a b / x / a+b b+a"]


# ---- silence


def test_a_silent_member_is_dead() -> None:
    center = running("a b", "w x")
    assert center.wait(5, "abx") == []
    assert center.wait(1, "abx") == ["publish 4: a b / x / a+b b+a", "release w", "collect worker w"]
    assert center.hear("w") == ["refuse w departed"] and "silent for 6.0 s, of 5 s allowed" in center.raw[0].reason


def test_everybody_silent_is_our_own_connection() -> None:
    center = running("a b", "w x")
    for id in "abwx":
        center.now += 0.2
        center.hear(id)
    assert center.wait(20) == [], "not even one after the other"
    center.hear("a")
    assert center.wait(5, "abw") == [], "they were there; the others have their time again"
    assert center.wait(1, "abw")[1] == "release x"


def test_everybody_silent_for_too_long() -> None:
    center = running("a b", "w")
    assert center.wait(29) == []
    assert center.wait(1)[-1] == "give up"
    assert (
        center.raw[-1].reason
        == "none of the members was heard within 30 s: name-a, name-b, name-w; start the run again"
    )


def test_a_center_that_was_paused_declares_nobody_dead() -> None:
    center = running("a b", "w x")
    center.wait(4, "abx")
    center.now += 60.0
    assert center.do(Ticked(now=center.now)) == []
    assert center.wait(5, "abx") == []
    assert center.wait(1, "abx")[1] == "release w"


def test_a_member_that_missed_the_view_is_reminded() -> None:
    center = running()
    assert center.hear("a") == [] and center.hear("a", epoch=1) == ["remind a of 2"]
    assert center.hear("nobody") == ["ask nobody"]
