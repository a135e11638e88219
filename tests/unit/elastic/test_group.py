"""Who is in an elastic run: the start, deaths, spares, newcomers, silent hosts and faults that pass."""

import random

import pytest

from shoal.elastic.group import step
from shoal.elastic.groupchanges import (
    Died,
    Event,
    GiveUp,
    Heard,
    HeardAgain,
    Instruction,
    Joined,
    Publish,
    Ready,
    Ticked,
)
from shoal.elastic.groupstate import State, Wanted
from support.elastic.group_tables import Coordinator, running


def test_the_first_view_is_made_when_all_are_ready() -> None:
    group = Coordinator(3)
    assert group.enter("b.1") == [] and group.enter("a.1") == [] and group.join("c.1") == []
    assert group.ready("c.1") == ["publish 1: a b c / 3"]
    assert group.ready("c.1") == [] and group.join("c.1") == [], "told twice"


def test_late_ones_are_waited_for_and_then_done_without() -> None:
    group = Coordinator(4, min_dp=2, join_seconds=10.0)
    group.enter("a.1")
    group.enter("b.1")
    assert group.wait(9.9) == []
    assert group.wait(0.2) == ["publish 1: a b / 4"]
    assert group.enter("c.1") == ["publish 2: a b c / 4"]


def test_too_few_at_the_start() -> None:
    group = Coordinator(4, min_dp=2, join_seconds=10.0)
    group.enter("a.1")
    assert group.wait(10.1) == ["give up"]
    assert isinstance(group.raw[0], GiveUp)
    assert group.raw[0].reason == (
        "1 of at least 2 replicas were there within 10 s (a); start hosts again, or lower elastic.min_dp"
    )
    assert group.enter("b.1") == ["expel b.1"] and group.wait(1) == []


def test_a_death_shrinks_the_run_and_tells_the_cause() -> None:
    group = running("a.1", "b.1", "c.1", "d.1")
    assert group.die("b.1") == ["publish 2: a c d / 4"]
    assert isinstance(group.raw[0], Publish) and group.raw[0].cause == "b.1 on h0: killed by signal 9"
    assert group.die("b.1") == [] and group.ready("b.1") == [], "told twice, and too late"
    assert group.join("b.1") == ["expel b.1"], "it has to come as another process"
    assert group.enter("b.2") == ["publish 3: a c d b / 4"]


def test_a_spare_takes_the_place_in_the_same_publication() -> None:
    group = running("a.1", "b.1", "c.1", spares=1)
    assert group.join("s.1", spare=True) == [] and group.ready("s.1") == []
    assert group.die("b.1") == ["publish 2: a s c / 3"]


def test_a_cold_spare_is_not_taken() -> None:
    group = running("a.1", "b.1", spares=1)
    group.join("s.1", spare=True)
    assert group.die("b.1") == ["publish 2: a / 2"]
    assert group.ready("s.1") == ["publish 3: a s / 2"]


def test_processes_of_a_replica_fail_as_one() -> None:
    group = Coordinator(2, replica_size=2)
    for replica in "ab":
        group.enter(f"{replica}.1/0", position=0)
        lines = group.enter(f"{replica}.1/1", position=1)
    assert lines == ["publish 1: a b / 2"]
    assert group.state.view is not None and group.state.view.members == ("a.1/0", "a.1/1", "b.1/0", "b.1/1")
    assert group.die("b.1/1") == ["expel b.1/0", "publish 2: a / 2"]


def test_a_replica_that_breaks_before_all_have_come_is_ordered_anew() -> None:
    group = Coordinator(1, replica_size=2, spares=1)
    group.hear("h0", slots=2)
    group.enter("a.1/0", position=0)
    assert group.enter("a.1/1", position=1) == ["publish 1: a / 1", "order replica-1 on h0 as spare"]
    group.join("replica-1.1/0", position=0)
    assert group.die("replica-1.1/0") == ["order replica-2 on h0 as spare"]
    assert group.join("replica-1.1/1", position=1) == ["expel replica-1.1/1"]


def test_who_is_told_to_go_is_left_out_and_not_held_against_its_host() -> None:
    group = running("a.1", "b.1", max_failures=0)
    assert group.leave("b.1") == ["publish 2: a / 2"]
    assert not group.state.hosts["h0"].is_out


def test_a_view_of_others_only_waits_until_those_before_have_ended() -> None:
    """The last replica is told to go while another one comes, and may be in the middle of a step."""
    group = running("a.1", num_logical=1, lease_seconds=5.0)
    group.enter("b.1", "h1")
    assert group.leave("a.1") == ["expel a.1"] and group.hear("h0", members=("a.1",)) == ["expel a.1"]
    assert group.die("a.1") == ["publish 2: b / 1"]
    group.enter("c.1", "h0")
    assert group.leave("b.1") == ["expel b.1"]
    assert group.wait(5.0, ("h0",)) == [] and group.wait(0.2, ("h0",)) == ["publish 3: c / 1"], "its lease is over"


def test_a_view_waits_for_all_of_those_before_and_not_only_for_the_last() -> None:
    """A host with both replicas is cut off, and they are told of one after the other: nobody has come to the view between."""
    group = running("b.1", "c.1", lease_seconds=5.0, spares=1)
    group.enter("a.1", "h1", spare=True)
    assert group.leave("b.1") == ["publish 2: a c / 2"]
    assert group.leave("c.1") == ["expel c.1"], "b and c may still take steps together, under epoch 1"
    assert group.wait(5.0, ("h1",)) == [] and group.wait(0.2, ("h1",)) == ["publish 3: a / 2"], "their lease is over"
    assert group.enter("b.2", "h1") == ["publish 4: a b / 2"] and group.state.earlier == (("a.1",),)


def test_one_of_those_before_that_is_dead_is_enough() -> None:
    group = running("a.1", "b.1", max_failures=0)
    group.enter("c.1", "h1")
    assert group.die("a.1") == ["expel b.1", "publish 2: c / 2"], "b cannot take a step without a"


def test_more_than_the_limit_wait() -> None:
    group = running("a.1", "b.1")
    assert group.enter("c.1") == []
    assert group.die("a.1") == ["publish 2: c b / 2"]


def test_a_batch_that_scales_has_as_many_logical_replicas_as_are_present() -> None:
    group = running("a.1", "b.1", scales=True, max_dp=3)
    assert group.enter("c.1") == ["publish 2: a b c / 3"]
    assert group.die("a.1") == ["publish 3: b c / 2"]


# ---- too few


def test_below_the_least_number_the_run_waits_and_then_gives_up() -> None:
    group = running("a.1", "b.1", min_dp=2, join_seconds=10.0)
    assert group.die("a.1") == []
    assert group.wait(5) == [] and group.enter("c.1") == ["publish 2: c b / 2"]
    assert group.die("c.1") == [] and group.wait(9.9) == []
    assert group.wait(0.2) == ["give up"]
    assert isinstance(group.raw[0], GiveUp) and "last: c.1 on h0: killed by signal 9" in group.raw[0].reason


def test_all_die_and_others_come() -> None:
    group = running("a.1", "b.1")
    group.die("a.1")
    assert group.die("b.1") == []
    assert group.enter("c.1") == ["publish 3: c / 2"]


# ---- orders


def test_the_dead_are_ordered_again_where_there_is_room() -> None:
    group = Coordinator(2)
    group.hear("h0", slots=1)
    group.hear("h1", slots=2)
    group.enter("a.1", "h0")
    group.enter("b.1", "h1")
    assert group.die("a.1") == ["publish 2: b / 2", "order replica-2 on h0"]
    assert group.wait(1, ("h0", "h1")) == [], "ordered once"
    assert group.enter("replica-2.1", "h0") == ["publish 3: b replica-2 / 2"]


def test_spares_are_ordered_when_the_run_has_begun() -> None:
    group = Coordinator(2, spares=1)
    group.hear("h0", slots=3)
    group.enter("a.1")
    assert group.enter("b.1") == ["publish 1: a b / 2", "order replica-2 on h0 as spare"]
    assert group.enter("replica-2.1", spare=True) == []
    assert group.die("a.1") == ["publish 2: replica-2 b / 2", "order replica-3 on h0 as spare"]


def test_an_order_that_nobody_follows_is_given_elsewhere() -> None:
    group = Coordinator(2, join_seconds=5.0, max_failures=0)
    for host in ("h0", "h1"):
        group.hear(host, slots=2)
    group.enter("a.1", "h0")
    group.enter("b.1", "h0")
    group.leave("b.1")
    assert group.state.ordered["replica-2"][0] == "h1"
    assert group.wait(5.1, ("h0", "h1")) == ["order replica-3 on h0"]
    assert group.state.hosts["h1"].is_out


def test_one_that_dies_before_it_joins_is_ordered_again() -> None:
    group = running("a.1", num_logical=1, spares=1)
    group.hear("h1", slots=1)
    died = Died(member="replica-1.1", cause="exit code 1", replica="replica-1", now=group.now)
    assert group.do(died) == ["order replica-2 on h1 as spare"] and len(group.state.hosts["h1"].failures) == 1
    assert group.do(died) == [] and group.join("replica-1.1", "h1") == ["expel replica-1.1"]


def test_one_that_dies_before_the_first_view_is_ordered_again() -> None:
    group = Coordinator(2)
    group.hear("h0", slots=2)
    assert group.enter("a.1") == []
    assert group.die("a.1") == ["order replica-2 on h0"]


def test_an_order_that_was_lost_is_given_again() -> None:
    group = running("a.1", num_logical=1, spares=1)
    assert group.hear("h1", slots=1, agent="x") == ["order replica-1 on h1 as spare"]
    assert group.hear("h1", agent="x", replicas=()) == ["order replica-1 on h1 as spare"]
    assert group.hear("h1", agent="x", replicas=("replica-1",)) == []
    assert group.hear("h1", agent="y", replicas=()) == ["order replica-2 on h1 as spare"], "it was lost with the agent"


def test_a_new_host_gets_replicas() -> None:
    group = running("a.1", num_logical=1, spares=1)
    assert group.hear("h9", slots=4) == ["order replica-1 on h9 as spare"]


# ---- silence


def test_a_silent_host_loses_its_lease_and_comes_back_with_nothing() -> None:
    group = running("a.1", "b.1", "c.1", hosts=("h0", "h1", "h1"), lease_seconds=5.0)
    assert group.wait(5.0, ("h0", "h1")) == []
    assert group.wait(5.0, ("h0",)) == []
    assert group.wait(0.2, ("h0",)) == ["expel b.1", "expel c.1", "publish 2: a / 3"]
    assert group.hear("h1", slots=1, epoch=1, members=("b.1",))[:2] == ["expel b.1", "remind h1 of 2"]
    assert group.enter("d.1", "h1") == ["publish 3: a d / 3"]


def test_a_view_that_is_over_has_no_lease() -> None:
    group = running("a.1", "b.1", hosts=("h0", "h0"), lease_seconds=5.0)
    group.hear("h9")
    assert group.state.lease_epoch == 1
    assert group.wait(5.2, ("h9",)) == ["expel a.1", "expel b.1"]
    group.hear("h0")
    assert group.state.epoch == 1 and group.state.lease_epoch == 2, "a and b may not go on"
    assert group.enter("c.1", "h9") == ["publish 2: c / 2"] and group.state.lease_epoch == 2


def test_another_agent_of_a_host_means_that_all_there_are_dead() -> None:
    """The host lost its power and was back within the lease."""
    group = running("a.1", "b.1", hosts=("h0", "h1"), lease_seconds=5.0)
    assert group.hear("h0", agent="x") == [] and group.hear("h1", agent="y") == []
    assert group.hear("h1", agent="z") == ["expel b.1", "publish 2: a / 2"]
    assert group.enter("c.1", "h1") == ["publish 3: a c / 2"]
    assert group.hear("h1", agent="y") == [], "what the first one said late"


def test_when_all_are_silent_it_is_our_own_connection() -> None:
    group = running("a.1", "b.1", hosts=("h0", "h1"), lease_seconds=5.0, join_seconds=60.0)
    group.hear("h0")
    assert group.wait(30) == []
    assert group.hear("h1") == []
    assert group.wait(4.9, ("h1",)) == [], "the other has its time again"
    assert group.wait(0.3, ("h1",)) == ["expel a.1", "publish 2: b / 2"]


def test_when_all_are_silent_for_too_long() -> None:
    group = running("a.1", "b.1", hosts=("h0", "h1"), lease_seconds=5.0, join_seconds=60.0)
    group.hear("h0")
    assert group.wait(60.2) == ["give up"]


def test_a_coordinator_that_was_paused_leaves_nobody_out() -> None:
    group = running("a.1", "b.1", hosts=("h0", "h1"), lease_seconds=5.0)
    group.wait(1, ("h0", "h1"))
    group.now += 20
    group.hear("h0")
    assert group.tick() == []
    assert group.wait(3, ("h0", "h1")) == []


def test_on_one_host_nobody_need_be_heard() -> None:
    group = running("a.1", "b.1")
    assert group.wait(600) == []


def test_a_view_that_was_lost_is_told_again() -> None:
    group = running("a.1", "b.1", hosts=("h0", "h1"))
    assert group.hear("h1", epoch=0) == ["remind h1 of 1"] and group.hear("h1", epoch=1) == []


# ---- faults that pass


def test_a_collective_that_fails_while_nobody_dies_is_tried_again() -> None:
    group = running("a.1", "b.1", "c.1", hosts=("h0", "h1", "h2"))
    group.now = 1.0
    assert group.fail("a.1", "h1") == [] and group.fail("b.1", "h0", "h2") == [] and group.fail("c.1", "h1") == []
    assert group.wait(0.4) == [] and group.wait(0.2) == ["retry 2: a b c / 3"]
    assert group.state.num_retries == 1
    assert [len(group.state.hosts[host].failures) for host in ("h0", "h1", "h2")] == [0, 1, 0]
    assert group.fail("a.1", epoch=1) == [] and group.wait(1) == [], "of an earlier epoch"


def test_a_failed_collective_waits_for_the_news_of_a_death() -> None:
    group = running("a.1", "b.1")
    group.fail("a.1")
    assert group.wait(0.3) == [] and group.die("b.1") == ["publish 2: a / 2"]
    assert group.wait(2) == [] and group.state.num_retries == 0


def test_a_host_that_fails_too_often_is_left_out() -> None:
    group = running("a.1", "b.1", "c.1", hosts=("h0", "h1", "h2"), max_failures=2)
    for epoch in (2, 3):
        group.fail("a.1", "h1")
        assert group.wait(0.6) == [f"retry {epoch}: a b c / 3"]
    group.fail("c.1", "h1")
    assert group.wait(0.6) == ["expel b.1", "publish 4: a c / 3"]
    assert group.join("b.2", "h1") == ["expel b.2"]


def test_failures_of_long_ago_are_forgotten() -> None:
    group = running("a.1", "b.1", hosts=("h0", "h1"), max_failures=1, failure_window=100.0)
    for _ in range(5):
        group.fail("a.1", "h1")
        assert group.wait(0.6)[0].startswith("retry")
        group.wait(101)


def test_deaths_are_failures_of_the_host() -> None:
    group = running("a.1", "b.1", "c.1", hosts=("h0", "h1", "h1"), max_failures=1)
    assert group.die("b.1") == ["publish 2: a c / 3"]
    group.join("b.2", "h1")
    assert group.die("b.2") == ["expel c.1", "publish 3: a / 3"]


def test_faults_without_a_host_to_blame_end_the_run() -> None:
    group = running("a.1", "b.1", max_failures=1)
    group.fail("a.1")
    assert group.wait(0.6) == ["retry 2: a b / 2"]
    group.fail("b.1")
    assert group.wait(0.6) == ["give up"]


# ---- slow ones, and the end


def test_a_slow_replica_is_left_out_only_where_that_was_asked_for_and_enough_are_left() -> None:
    assert running("a.1", "b.1").slow("b.1") == []
    assert running("a.1", "b.1", drops_slow=True, min_dp=2).slow("b.1") == []
    group = running("a.1", "b.1", drops_slow=True)
    assert group.slow("b.1") == ["expel b.1", "publish 2: a / 2"], "it still runs"
    assert group.slow("a.1") == []


def test_after_the_end_nothing_happens() -> None:
    group = running("a.1", "b.1")
    assert group.end() == [] and group.die("a.1") == [] and group.wait(5) == []
    assert group.join("c.1") == ["expel c.1"]


def test_a_replica_that_comes_back_under_its_name_is_another_one() -> None:
    group = running("a.1", "b.1")
    group.die("b.1")
    assert group.join("b.2") == [] and group.join("b.3") == ["expel b.3"]
    assert group.ready("b.2") == ["publish 3: a b / 2"]
    assert group.state.view is not None and group.state.view.members == ("a.1", "b.2")


def _told(state: State, events: list[Event]) -> tuple[State, list[Instruction]]:
    found: list[Instruction] = []
    for event in events:
        state, instructions = step(state, event)
        found += instructions
    return state, found


@pytest.mark.parametrize("seed", range(20))
def test_signs_of_life_of_many_hosts_at_once_are_those_of_each(seed: int) -> None:
    """With silent hosts, agents that were started anew, hosts that nobody knows, and times in which nobody was heard."""
    dice = random.Random(seed)
    one = many = State(wanted=Wanted(num_logical=4, min_dp=2, lease_seconds=10.0, spares=1))
    for number in range(4):
        host = f"h{number}"
        events: list[Event] = [
            Heard(host=host, agent=f"{host}/1", slots=2, now=0.0),
            Joined(member=f"m{number}", replica=f"r{number}", host=host, now=0.0),
            Ready(member=f"m{number}", now=0.0),
        ]
        one, many = _told(one, events)[0], _told(many, events)[0]
    now = 0.0
    for _ in range(30):
        now += dice.choice((0.5, 1.0, 1.0, 2.0, 7.0, 12.0))
        names = dice.sample([f"h{number}" for number in range(5)], dice.randint(1, 4))
        agents = {name: f"{name}/{dice.choice((1, 1, 1, 1, 2))}" for name in names}
        one, said = _told(one, [Heard(host=name, agent=agent, now=now) for name, agent in agents.items()])
        many, at_once = _told(many, [HeardAgain(agents=agents, now=now)])
        assert at_once == said and many == one
        tick = [Ticked(now=now)]
        one, many = _told(one, tick)[0], _told(many, tick)[0]
        assert many == one
