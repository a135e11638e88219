"""Servers that die and come, and what becomes of the shards that they had."""

import pytest

from support.elastic.membership_tables import running


def test_a_primary_dies() -> None:
    center = running("a b c")
    assert center.leave("b") == [
        "publish 3: a c / w / a~c3 c~a3 c+a",
        "sync 0 a->c 3",
        "sync 1 c->a 3",
        "collect server b",
    ]


def test_a_backup_dies_and_is_made_anew() -> None:
    center = running("a b", backups=1)
    assert center.leave("b") == ["publish 3: a / w / a a", "collect server b"]
    assert center.join("c") == ["publish 4: a c / w / a~c4 a~c4", "sync 0 a->c 4", "sync 1 a->c 4"]
    assert center.synced(0, "c", 4) == ["publish 5: a c / w / a+c a~c4"], "the book stays where it is"
    assert center.synced(1, "c", 4) == ["publish 6: a c / w / a+c c+a"], (
        "another shard is led by the newcomer at no cost"
    )
    assert center.synced(1, "c", 4) == [], "told twice"


def test_all_replicas_of_a_shard_die() -> None:
    center = running("a b c")
    center.leave("b")
    assert center.leave("c") == ["publish 4: a / w / a a a #1", "restore (1,) #1", "collect server c"]
    assert center.join("d")[0] == "publish 5: a d / w / a~d5 a~d5 a~d5 #1"


def test_a_view_says_whose_deaths_took_everyone_back() -> None:
    center = running("a b c", backups=1)
    center.leave("a")
    assert center.state.fallen == ("name-a",) and center.state.view.lost == ()
    center.leave("b")
    assert center.state.view.history == 1 and center.state.view.lost == ("name-a", "name-b")
    # It is still said when the view changes for another reason, and forgotten by nobody who comes later.
    center.join("x")
    assert center.state.view.lost == ("name-a", "name-b") and center.state.fallen == ()


def test_a_death_that_was_made_good_is_not_blamed_later() -> None:
    center = running("a b")
    center.leave("b")
    center.join("b2", "name-b2")
    orders = {shard: chain.joining[0].order for shard, chain in enumerate(center.state.view.chains)}
    for shard, order in orders.items():
        center.synced(shard, "b2", order)
    assert center.state.fallen == ()
    center.leave("a")
    center.leave("b2")
    center.join("c")
    center.join("d")
    assert center.state.view.lost == ("name-a", "name-b2")


def test_an_unsynced_replica_is_never_promoted() -> None:
    center = running("a b")
    center.leave("b")
    center.join("c")
    assert center.leave("a") == ["publish 5: c / w / c c #1", "restore (0, 1) #1", "collect server a"]


def test_all_servers_die() -> None:
    center = running("a b")
    center.leave("a")
    assert center.leave("b") == [] and center.state.phase == "gathering"
    assert center.hear("w", epoch=2) == []
    assert center.join("c") == []
    assert center.join("d") == [
        "publish 4: c d / w / c+d d+c #1",
        "restore (0, 1) #1",
        "collect server b",
    ]


def test_all_servers_die_and_fewer_come_back() -> None:
    center = running("a b")
    center.leave("a")
    center.leave("b")
    center.join("c")
    assert center.wait(30, "cw") == ["publish 4: c / w / c c #1", "restore (0, 1) #1", "collect server b"]
    center.leave("c")
    assert center.wait(30, "w")[-1] == "give up"


def test_a_server_and_its_replacement_under_the_same_name() -> None:
    center = running("a b")
    assert center.join("c", "name-b") == [
        "refuse b replaced",
        "publish 3: a c / w / a~c3 a~c3",
        "sync 0 a->c 3",
        "sync 1 a->c 3",
        "collect server b",
    ]
    assert center.hear("b") == ["refuse b replaced"] and center.join("b") == ["refuse b replaced"]
    assert "every process needs a name of its own" in center.raw[0].reason


def test_joining_begins_again_under_a_new_primary() -> None:
    center = running("a b c", backups=2)
    center.leave("c")
    center.join("d")
    assert center.view == "4: a b d / w / a+b~d4 b+a~d4 a+b~d4"
    assert center.leave("a") == [
        "publish 5: b d / w / b~d5 b~d4 b~d5",
        "sync 0 b->d 5",
        "sync 2 b->d 5",
        "collect server a",
    ]
    assert center.synced(0, "d", 4) == [], "an answer to the order of the dead primary"
    assert center.synced(0, "d", 5) == ["publish 6: b d / w / b+d b~d4 b~d5"]


@pytest.mark.parametrize(
    ("shard", "server", "order"), [(0, "a", 3), (0, "z", 3), (7, "b", 3), (-1, "b", 3), (0, "b", 2)]
)
def test_a_stale_or_senseless_answer_changes_nothing(shard: int, server: str, order: int) -> None:
    center = running("a b")
    before = center.state
    assert center.synced(shard, server, order) == [] and center.state == before


def test_a_backup_that_does_not_follow_is_replaced_by_another() -> None:
    center = running("a b c")
    assert center.fail(0, "a", "b") == ["publish 3: a b c / w / a~c3 b+c c+a", "sync 0 a->c 3", "collect replica b 0"]
    assert center.fail(0, "a", "b", epoch=2) == [], "said of an earlier view"
    assert center.fail(0, "b", "c") == [], "not its primary"
    assert center.fail(1, "b", "b") == [] and center.fail(1, "b", "a") == []


def test_the_same_backup_is_tried_again_later_if_there_is_no_other() -> None:
    center = running("a b")
    assert center.fail(0, "a", "b") == ["publish 3: a b / w / a b+a", "collect replica b 0"]
    assert center.wait(4, "abw") == []
    assert center.wait(1, "abw") == ["publish 4: a b / w / a~b4 b+a", "sync 0 a->b 4"]
