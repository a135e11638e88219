"""The center's decisions as tables: what happened, and the list of instructions, each as one short line.

A view reads ``2: a b / w / a+b b+a``: epoch 2, servers a and b, worker w, shard 0 at a with backup b, and so on; ``~c3`` joins
under order 3, and ``#1`` at the end is the history.
"""

from collections.abc import Iterable

import pytest

from shoal.elastic.changes import (
    Ask,
    Collect,
    Elected,
    Event,
    Failed,
    GiveUp,
    Heard,
    Instruction,
    Joined,
    Left,
    Publish,
    Refuse,
    Release,
    Remind,
    Report,
    Restore,
    Sync,
    Synced,
    Ticked,
)
from shoal.elastic.membership import State, Wanted, step
from shoal.elastic.view import Chain, Member, View


def member(id: str, name: str = "") -> Member:
    """Workers are v, w, x, y, z; all else are servers."""
    return Member(id=id, name=name or f"name-{id}", role="worker" if id[0] in "vwxyz" else "server")


def show_view(view: View) -> str:
    def show(chain: Chain) -> str:
        return "+".join(chain.synced) + "".join(f"~{one.server}{one.order}" for one in chain.joining)

    ids = " ".join(one.id for one in view.servers), " ".join(one.id for one in view.workers)
    history = f" #{view.history}" if view.history else ""
    return f"{view.epoch}: {ids[0]} / {ids[1]} / {' '.join(map(show, view.chains))}{history}"


def show(instruction: Instruction) -> str:
    match instruction:
        case Publish(view=view):
            return f"publish {show_view(view)}"
        case Remind(id=id, view=view):
            return f"remind {id} of {view.epoch}"
        case Ask(id=id):
            return f"ask {id}"
        case Restore(shards=shards, history=history):
            return f"restore {shards} #{history}"
        case Release(worker=worker):
            return f"release {worker}"
        case Sync(shard=shard, source=source, target=target, order=order):
            return f"sync {shard} {source}->{target} {order}"
        case Collect(kind=kind, id=id, shard=shard):
            return f"collect {kind} {id}" + ("" if shard is None else f" {shard}")
        case Refuse(id=id, code=code):
            return f"refuse {id} {code}"
        case GiveUp():
            return "give up"


class Center:
    """The state machine with a clock, fed by short words."""

    def __init__(self, *, servers: int = 2, backups: int = 1, epoch: int = 1, **election: object) -> None:
        self.now = 100.0
        wanted = Wanted(servers=servers, backups=backups, dead_seconds=5.0, join_seconds=30.0)
        self.state = State(wanted=wanted)
        self.raw: list[Instruction] = []
        self.first = self.do(Elected(epoch=epoch, now=self.now, **election))

    def do(self, event: Event) -> list[str]:
        self.state, self.raw = step(self.state, event)
        return [show(one) for one in self.raw]

    def join(self, id: str, name: str = "", view: View | None = None) -> list[str]:
        return self.do(Joined(member=member(id, name), now=self.now, view=view))

    def leave(self, id: str) -> list[str]:
        return self.do(Left(id=id, reason="killed by signal 9", now=self.now))

    def hear(self, id: str, epoch: int | None = None) -> list[str]:
        seen = epoch if epoch is not None else self.state.view.epoch if self.state.view else 0
        return self.do(Heard(id=id, now=self.now, epoch=seen))

    def fail(self, shard: int, reporter: str, server: str, epoch: int | None = None) -> list[str]:
        epoch = self.state.view.epoch if epoch is None else epoch
        event = Failed(shard=shard, server=server, reporter=reporter, epoch=epoch, reason="no answer", now=self.now)
        return self.do(event)

    def synced(self, shard: int, server: str, order: int) -> list[str]:
        return self.do(Synced(shard=shard, server=server, order=order))

    def wait(self, seconds: float, heard: Iterable[str] = ()) -> list[str]:
        """Let time go on in ticks of a second, with signs of life of some."""
        done = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for id in heard:
                done += self.hear(id)
            done += self.do(Ticked(now=self.now))
        return done

    @property
    def view(self) -> str:
        return show_view(self.state.view)


def running(servers: str = "a b", workers: str = "w", backups: int = 1) -> Center:
    center = Center(servers=len(servers.split()), backups=backups)
    for id in [*servers.split(), *workers.split()]:
        center.join(id)
    assert center.state.phase == "running"
    return center


# ---- the start


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


# ---- servers


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


# ---- workers


def test_a_worker_dies_joins_and_returns() -> None:
    center = running("a b", "w x")
    assert center.leave("w") == ["publish 4: a b / x / a+b b+a", "release w", "collect worker w"]
    assert center.hear("w") == ["refuse w departed"]
    assert center.join("w") == ["refuse w departed"] and "killed by signal 9; it may join again" in center.raw[0].reason
    assert center.join("w2", "name-w") == ["publish 5: a b / x w2 / a+b b+a"]


def test_a_second_incarnation_releases_the_first() -> None:
    center = running("a b", "w")
    assert center.join("w2", "name-w") == [
        "refuse w replaced",
        "publish 3: a b / w2 / a+b b+a",
        "release w",
        "collect worker w",
    ]


def test_an_earlier_incarnation_that_is_heard_late() -> None:
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


# ---- a new center


def old_view(epoch: int = 7, servers: str = "a b", workers: str = "w", **more: object) -> View:
    chains = more.pop("chains", (Chain(primary="a", backups=("b",)), Chain(primary="b", backups=("a",))))
    return View(
        epoch=epoch,
        servers=tuple(member(id) for id in servers.split()),
        workers=tuple(member(id) for id in workers.split()),
        chains=chains,
        **more,
    )


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
