"""A center that was just elected: what it makes of what the members tell of the time before."""

from shoal.elastic.changes import Joined, Report
from shoal.elastic.membership import State, Wanted, step
from shoal.elastic.view import Chain
from support.elastic.membership_tables import Center, member, old_view, running


def test_a_new_center_takes_the_newest_view_and_waits_for_all_in_it() -> None:
    reports = (
        Report(member=member("a"), view=old_view(6, workers="w x")),
        Report(member=member("w"), view=old_view(7)),
    )
    center = Center(epoch=9, reports=reports)
    assert center.first == []
    assert center.join("b", view=old_view(6, workers="w x")) == ["publish 10: a b / w / a+b b+a"]
    assert center.hear("x", epoch=6) == ["ask x"]
    assert center.join("x", view=old_view(6, workers="w x")) == ["refuse x departed"]
    assert "the view of epoch 6 that it holds is over" in center.raw[0].reason


def test_it_asks_only_for_what_it_needs() -> None:
    center = Center(epoch=9)
    assert center.hear("a", epoch=6) == ["ask a"], "no view yet"
    assert center.join("a", view=old_view(6)) == []
    assert center.hear("b", epoch=6) == [], "it can hold nothing that a has not told"
    assert center.hear("w", epoch=7) == ["ask w"], "it has seen more"
    assert center.join("w", view=old_view(7)) == ["publish 10: a b / w / a+b b+a"]


def test_who_died_with_the_old_center() -> None:
    center = Center(epoch=9, reports=(Report(member=member("a"), view=old_view()),))
    assert center.wait(4, "a") == []
    center.hear("w")
    assert center.wait(1, "aw") == ["publish 10: a / w / a a", "collect server b"]
    assert center.hear("b") == ["refuse b departed"]


def test_a_new_center_that_hears_nobody_declares_nobody_dead() -> None:
    center = Center(epoch=9, kept=old_view())
    assert center.wait(20) == [] and center.hear("a") == []
    assert center.wait(4, "a") == []
    center.hear("b")
    assert center.wait(1, "ab") == ["publish 10: a b /  / a+b b+a", "release w", "collect worker w"]


def test_a_new_center_that_hears_only_newcomers_believes_that_the_old_ones_are_dead() -> None:
    center = Center(epoch=9, kept=old_view())
    center.join("c")
    center.join("d")
    assert center.wait(4, "cd") == []
    assert center.wait(1, "cd") == [
        "publish 10: c d /  / c+d d+c #1",
        "restore (0, 1) #1",
        "release w",
        "collect server a",
        "collect server b",
        "collect worker w",
    ]


def test_a_new_center_that_hears_nobody_for_long() -> None:
    center = Center(epoch=9, kept=old_view())
    assert center.wait(30) == [] and center.state.phase == "gathering"
    assert center.wait(30)[-1] == "give up"


def test_a_death_that_is_told_does_not_have_to_be_waited_for() -> None:
    center = Center(epoch=9, reports=(Report(member=member("a"), view=old_view()), Report(member=member("w"))))
    assert center.leave("b") == ["publish 10: a / w / a a", "collect server b"]


def test_newcomers_wait_until_the_old_ones_have_told() -> None:
    center = Center(servers=1, epoch=9)
    assert center.join("c") == [] and center.join("x") == [], "a fresh start would forget the old weights"
    view = old_view(chains=(Chain(primary="a", backups=()),), servers="a")
    center.join("a", view=view)
    assert center.join("w", view=view) == ["publish 10: a c / w x / a~c10", "sync 0 a->c 10"]


def test_a_fresh_start_when_nobody_tells_of_a_view() -> None:
    center = Center(servers=1, epoch=9)
    center.join("c")
    center.join("x")
    assert center.wait(4, "cx") == []
    assert center.wait(1, "cx") == ["publish 10: c / x / c"]
    fresh = Center(servers=1, epoch=9, fresh=True)
    fresh.join("c")
    assert fresh.join("x") == ["publish 10: c / x / c"]


def test_a_view_that_comes_late_but_before_the_start() -> None:
    center = Center(servers=1, epoch=9)
    center.join("c")
    center.wait(5, "c")
    assert center.state.phase == "gathering"
    center.join("a", view=old_view(chains=(Chain(primary="a", backups=()),), servers="a"))
    assert center.hear("w", epoch=7) == ["publish 10: a c / w / a~c10", "sync 0 a->c 10"]


def test_a_view_that_was_written_down() -> None:
    center = Center(epoch=9, kept=old_view(8, workers="w x"), reports=(Report(member=member("a"), view=old_view()),))
    center.hear("b", epoch=7)
    center.hear("w", epoch=7)
    assert center.leave("x") == ["publish 10: a b / w / a+b b+a", "release x", "collect worker x"]


def test_syncs_are_ordered_again_as_they_were() -> None:
    center = running("a b")
    center.leave("b")
    center.join("c")
    before = center.state.view
    after = Center(epoch=9, reports=tuple(Report(member=one, view=before) for one in before))
    assert after.first == ["publish 10: a c / w / a~c4 a~c4", "sync 0 a->c 4", "sync 1 a->c 4"]
    assert after.synced(0, "c", 4)[0] == "publish 11: a c / w / a+c a~c4"


def test_one_that_comes_again_still_tells_of_the_run() -> None:
    """All were told to come again by a center that died then: a fresh start would forget even the checkpoint."""
    center = Center(epoch=9)
    center.join("a2", "name-a", view=old_view())
    center.join("b2", "name-b", view=old_view())
    assert center.join("w2", "name-w", view=old_view())[1:4] == [
        "publish 10: a2 b2 / w2 / a2+b2 b2+a2 #1",
        "restore (0, 1) #1",
        "release w",
    ]


def test_removed_by_the_old_center_and_back_before_anybody_else() -> None:
    center = Center(epoch=9)
    center.join("x", view=old_view(5, workers="w x"))
    center.join("a", view=old_view())
    center.join("b", view=old_view())
    assert center.join("w", view=old_view()) == ["refuse x departed", "publish 10: a b / w / a+b b+a"]


def test_replaced_while_the_new_center_settles() -> None:
    center = Center(epoch=9, reports=(Report(member=member("a"), view=old_view()), Report(member=member("w"))))
    assert center.join("b2", "name-b") == [
        "refuse b replaced",
        "publish 10: a b2 / w / a~b210 a~b210",
        "sync 0 a->b2 10",
        "sync 1 a->b2 10",
        "collect server b",
    ]


def test_somebody_leads_above_us() -> None:
    center = Center(epoch=9)
    assert center.join("a", view=old_view(12)) == [] and center.state.view is None


def test_nothing_is_decided_before_the_election() -> None:
    state = State(wanted=Wanted(servers=1))
    assert step(state, Joined(member=member("a"), now=0.0)) == (state, [])
