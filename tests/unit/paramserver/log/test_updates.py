"""The update log: who may take what, what a commit becomes, and that nothing is lost or counted twice."""

import json
import math

import msgspec
import pytest

from shoal.core.updaterule import UpdateRule
from shoal.paramserver.consistency import Lateness
from shoal.paramserver.log.queue import GONE_KEPT, REMEMBERED
from shoal.paramserver.log.updates import LogTrimmed, UpdateLog
from shoal.paramserver.records import (
    Committed,
    Dropped,
    Duplicate,
    Finished,
    PushId,
    PushRecord,
    Refused,
    Wait,
    WorkUnit,
)


class Desk:
    """An update log with workers that count their own pushes."""

    def __init__(self, update: str, *, workers: int = 2, steps: int = 4, names: str = "ab", **settings) -> None:
        self.update_log = UpdateLog(rule=UpdateRule.parse(update), workers=workers, steps=steps, **settings)
        self.numbers: dict[str, int] = {}
        for index, name in enumerate(names):
            self.update_log.join(name, index, 0.0)

    def take(self, worker: str, now: float = 0.0, held=None):
        return self.update_log.take(worker, now, held)

    def commit(
        self,
        worker: str,
        *units: int,
        now: float = 1.0,
        version: int | None = None,
        samples: int = 4,
        loss=1.0,
        **more,
    ):
        number = self.numbers.get(worker, 0)
        self.numbers[worker] = number + 1
        version = self.update_log.closed if version is None else version
        return self.update_log.commit(
            PushRecord(
                worker=worker,
                number=number,
                units=units,
                samples=samples,
                weight=float(samples),
                loss=loss,
                version=version,
                **more,
            ),
            now,
        )

    def entries(self) -> list[list[tuple]]:
        return [[tuple(entry) for entry in record.entries] for record in self.update_log.log(0)]


def numbers(*answers) -> list[int]:
    return [answer.number for answer in answers]


def test_units_come_by_step_and_the_own_share_first():
    desk = Desk("async", workers=3, names="abc")
    assert numbers(desk.take("c"), desk.take("c"), desk.take("a"), desk.take("b")) == [2, 0, 1, 4]
    assert desk.take("a") == WorkUnit(number=3, step=1, share=0, need=0)


def test_bsp_makes_everyone_wait_for_the_step_and_names_whom_it_waits_for():
    desk = Desk("bsp")
    assert numbers(desk.take("a"), desk.take("b")) == [0, 1]
    assert isinstance(desk.commit("a", 0), Committed)
    waiting = desk.take("a")
    assert isinstance(waiting, Wait) and waiting.on == ("b",) and "update 0 to close" in waiting.reason
    answer = desk.commit("b", 1)
    assert [record.number for record in answer.change.closed] == [0]
    assert desk.take("a") == WorkUnit(number=2, step=1, share=0, need=1, bound=1)


def test_an_update_is_in_share_order_whoever_came_first():
    desk = Desk("bsp")
    desk.take("a"), desk.take("b")
    desk.commit("b", 1, loss=4.0, samples=1)
    desk.commit("a", 0, loss=1.0, samples=3)
    (record,) = desk.update_log.log(0)
    assert desk.entries() == [[("a", 0, 1.0), ("b", 0, 1.0)]]
    assert (record.loss, record.samples, record.first_step, record.last_step) == (1.75, 4, 0, 0)


def test_ssp_lets_the_fast_go_ahead_to_the_bound_and_not_beyond():
    desk = Desk("ssp:2", steps=9)
    assert desk.take("b").number == 1
    for unit in (0, 2, 3, 4, 5):
        assert desk.take("a").number == unit
        desk.commit("a", unit, version=0)
    waiting = desk.take("a")
    assert isinstance(waiting, Wait) and waiting.on == ("b",)
    answer = desk.commit("b", 1, version=0)
    assert [record.number for record in answer.change.closed] == [0, 1, 2], "steps 1 and 2 waited for step 0"
    assert [record.staleness for record in answer.change.closed] == [0, 1, 2]
    assert desk.take("a") == WorkUnit(number=6, step=3, share=0, need=3, bound=1), (
        "its own updates are in what it reads"
    )


def test_a_read_below_the_bound_is_refused():
    desk = Desk("ssp:1", steps=9)
    for unit in range(4):
        desk.take("a")
        desk.commit("a", unit, version=unit // 2)
    assert desk.take("a").number == 4
    answer = desk.commit("a", 4, version=0)
    assert isinstance(answer, Refused) and "read version 0, and step 2 needs 1" in answer.reason
    assert isinstance(desk.commit("a", 4, version=1), Committed)
    assert desk.commit("a", 5, version=9).reason == "it read version 9, and there are only 2"


def test_a_dead_workers_units_go_to_the_front_and_what_it_committed_stays():
    desk = Desk("ssp:3")
    desk.take("a"), desk.take("b"), desk.take("a"), desk.take("b")
    desk.commit("b", 1)
    change = desk.update_log.leave("a", 1.0)
    assert change and change.freed == (0, 2)
    assert numbers(desk.take("b"), desk.take("b"), desk.take("b")) == [0, 2, 5]
    assert isinstance(desk.commit("a", 0), Refused)
    assert desk.update_log.committed("b") == {0} and desk.update_log.committed("a") == frozenset()


def test_a_worker_that_left_comes_back_only_as_another():
    desk = Desk("bsp")
    desk.update_log.leave("a", 0.0)
    assert "new instance" in desk.update_log.join("a", 0, 1.0).reason
    assert not desk.update_log.leave("a", 2.0), "leaving twice changes nothing"
    assert isinstance(desk.take("a"), Refused)


def test_the_first_commit_of_a_unit_wins():
    desk = Desk("bsp", duplicate_after=2.0)
    desk.take("a", 0.0), desk.take("b", 0.0)
    desk.commit("a", 0, now=1.0)
    assert desk.take("a", 1.5).until == 2.0, "b has had it for less than two mean step times"
    assert desk.take("a", 2.0).number == 1
    assert isinstance(desk.commit("a", 1, now=3.0), Committed)
    answer = desk.commit("b", 1, now=4.0)
    assert isinstance(answer, Duplicate) and desk.update_log.num_duplicates == 1
    desk.take("a"), desk.take("b")
    desk.commit("a", 2)
    desk.commit("b", 3)
    assert desk.update_log.log(1)[0].dropped == (PushId("b", 0),), "the shards are told to forget it"


def test_a_commit_that_is_sent_again_gets_its_answer_again_and_counts_once():
    desk = Desk("async")
    desk.take("a")
    first = PushRecord(worker="a", number=0, units=(0,), samples=1, weight=1, loss=1.0, version=0)
    assert not desk.update_log.commit(first, 1.0).is_again
    assert desk.update_log.commit(first, 2.0) == Committed(update=0, is_again=True)
    assert desk.update_log.closed == 1


def test_answers_are_remembered_for_a_while_and_older_numbers_are_refused():
    desk = Desk("async", steps=200)
    for unit in range(REMEMBERED + 5):
        desk.take("a")
        assert isinstance(desk.commit("a", unit), Committed)
    old = PushRecord(worker="a", number=3, units=(3,), samples=1, weight=1, loss=1.0, version=0)
    assert "below 5" in desk.update_log.commit(old, 1.0).reason
    desk.take("a")
    desk.commit("a", REMEMBERED + 5)
    assert desk.update_log.log(REMEMBERED + 5)[0].dropped == ()


def test_a_take_whose_answer_was_lost_is_given_again():
    desk = Desk("bsp")
    assert desk.take("a", 0.0, held=()).number == 0
    assert desk.take("a", 0.1, held=()).number == 0
    assert desk.take("a", 0.2, held=(0,)).number == 1


def test_async_reads_its_own_writes():
    desk = Desk("async")
    assert desk.take("a").need == 0
    answer = desk.commit("a", 0)
    assert (answer.update, answer.change.closed[0].number) == (0, 0)
    assert desk.take("a").need == 1
    assert desk.take("b").need == 0, "another's writes may be read late"


def test_half_closes_at_the_quorum_and_its_members_wait_for_it():
    desk = Desk("half:2,0.5", workers=3, names="abc")
    desk.take("a"), desk.take("b"), desk.take("c")
    assert not desk.commit("a", 0).change.closed
    assert "1 of 2 pushes" in desk.take("a").reason
    assert [len(record.entries) for record in desk.commit("b", 1, samples=12).change.closed] == [2]
    assert desk.entries() == [[("a", 0, 0.25), ("b", 0, 0.75)]]
    late = desk.commit("c", 2, version=0)
    assert late.update == 1, "late ones go into the next update"
    assert desk.take("a").need == 1
    desk.commit("a", 3, version=1)
    assert desk.entries()[1] == [("c", 0, pytest.approx(1 / 3)), ("a", 1, pytest.approx(2 / 3))]


def test_half_closes_when_the_longest_wait_of_the_slowest_is_over():
    desk = Desk("half:3,0.5", workers=3, names="abc")
    desk.take("a", 0.0), desk.take("b", 0.0), desk.take("c", 0.0)
    assert desk.update_log.deadline() is None
    desk.commit("a", 0, now=2.0)
    assert desk.update_log.deadline() == 2.0 + 0.5 * 2.0
    desk.commit("b", 1, now=2.5, waited=0.5)
    assert desk.update_log.deadline() == 3.0, "time that was waited is no step time"
    assert not desk.update_log.tick(2.9)
    assert [len(record.entries) for record in desk.update_log.tick(3.0).closed] == [2]
    assert desk.update_log.deadline() is None


def test_half_does_not_wait_for_the_dead():
    desk = Desk("half:3,0", workers=3, names="abc")
    desk.take("a"), desk.take("b"), desk.take("c")
    desk.commit("a", 0)
    desk.commit("b", 1)
    change = desk.update_log.leave("c", 2.0)
    assert len(change.closed) == 1 and change.freed == (2,)


def test_a_push_past_the_bound_is_dropped_and_its_unit_is_done_again():
    desk = Desk("async", workers=3, names="abc", lateness=Lateness(drop_beyond=1))
    desk.take("a"), desk.take("b"), desk.take("c")
    desk.commit("a", 0)
    assert isinstance(desk.commit("b", 1, version=0), Committed)
    answer = desk.commit("c", 2, version=0)
    assert isinstance(answer, Dropped) and answer.age == 2 and answer.change.freed == (2,)
    assert desk.take("a").number == 2
    assert desk.commit("a", 2).change.closed[0].dropped == (PushId("c", 0),)


def test_downpour_takes_several_and_is_told_to_commit_the_last_ones():
    desk = Desk("downpour:3,2", workers=1, steps=4, names="a")
    assert numbers(*(desk.take("a") for _ in range(3))) == [0, 1, 2]
    assert desk.commit("a", 0, 1, 2).change.closed[0].last_step == 2
    assert desk.take("a").number == 3
    assert desk.take("a").must_commit
    assert desk.commit("a", 3).change.is_finished
    assert desk.take("a") == Finished()


def test_leftovers_of_half_close_as_a_last_update():
    desk = Desk("half:2,0", workers=2, steps=1, names="ab")
    assert numbers(desk.take("a")) == [0]
    desk.commit("a", 0)
    assert isinstance(desk.take("a"), Wait)
    assert numbers(desk.take("b")) == [1]
    assert desk.commit("b", 1).change.is_finished
    odd = Desk("half:2,0", workers=3, steps=1, names="ab")
    odd.take("a"), odd.take("b")
    odd.commit("a", 0), odd.commit("b", 1)
    odd.take("a")
    answer = odd.commit("a", 2)
    assert len(answer.change.closed[0].entries) == 1 and answer.change.is_finished


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ((), "not distinct"),
        ((0, 0), "not distinct"),
        ((99,), "0 to 7"),
        ((1,), "not in this worker's"),
        ((0, 2), "2 work units"),
    ],
)
def test_a_commit_that_cannot_be_right_is_refused_and_changes_no_work(units, words):
    desk = Desk("bsp")
    desk.take("a")
    answer = desk.commit("a", *units)
    assert isinstance(answer, Refused) and words in answer.reason
    assert isinstance(desk.commit("a", 0), Committed)


@pytest.mark.parametrize(
    ("name", "number"),
    [("samples", -1), ("weight", math.nan), ("steps", math.inf), ("steps", -2.0), ("waited", math.nan)],
)
def test_a_push_with_numbers_that_make_no_sense_is_refused(name, number):
    """They go into what gradients are multiplied by: one NaN among them would be in every weight."""
    desk = Desk("half:2,0")
    desk.take("a")
    sound = PushRecord(worker="a", number=0, units=(0,), samples=1, weight=1.0, loss=1.0, version=0)
    answer = desk.update_log.commit(msgspec.structs.replace(sound, **{name: number}), 1.0)
    assert isinstance(answer, Refused) and f"its {name} is {number:g}" in answer.reason
    assert not desk.update_log.log(0)


def test_the_log_can_be_trimmed_and_says_so():
    desk = Desk("async")
    for unit in range(3):
        desk.take("a")
        desk.commit("a", unit)
    desk.update_log.trim(2)
    assert [record.number for record in desk.update_log.log(2)] == [2] and desk.update_log.closed == 3
    with pytest.raises(LogTrimmed, match="update 1 is asked for, and the log begins at 2"):
        desk.update_log.log(1)
    assert desk.update_log.log(3) == ()
    assert desk.update_log.committed("a") == {2}


@pytest.mark.parametrize("update", ["bsp", "ssp:2", "async", "half:3,0.5", "downpour:2,2"])
def test_a_restored_update_log_goes_on_as_the_first_would(update):
    desk = Desk(update, workers=3, names="abc", steps=6, lateness=Lateness(drop_beyond=9), duplicate_after=3.0)
    desk.take("a", 0.1), desk.take("b", 0.2), desk.take("c", 0.3)
    desk.commit("b", 1, now=0.7, loss=0.1)
    desk.update_log.trim(1)
    other = UpdateLog.restore(json.loads(json.dumps(desk.update_log.export())))
    assert other.digest() == desk.update_log.digest()
    for update_log in (desk.update_log, other):
        update_log.leave("c", 0.9)
        update_log.take("a", 1.0)
        update_log.commit(PushRecord(worker="a", number=0, units=(0,), samples=2, weight=2.0, loss=0.3, version=0), 1.1)
        update_log.tick(1e9)
        update_log.rebase(5.0)
    assert other.digest() == desk.update_log.digest()
    assert other.log(1) == desk.update_log.log(1)
    other.join("d", 3, 2.0)
    assert other.digest() != desk.update_log.digest()


def test_a_new_leader_with_another_clock_begins_the_waits_again():
    desk = Desk("half:3,0.5", workers=3, names="abc")
    desk.take("a", 1000.0)
    desk.commit("a", 0, now=1002.0)
    desk.update_log.rebase(5.0)
    assert desk.update_log.deadline() == 6.0


def test_a_restart_from_a_checkpoint_does_again_what_was_not_in_an_update():
    desk = Desk("ssp:2", steps=3)
    for _ in range(3):
        desk.take("a")
    for unit in (0, 1, 2):
        desk.commit("a", unit)
    desk.take("a")
    update_log = UpdateLog.restore(json.loads(json.dumps(desk.update_log.export())))
    update_log.restart(0.0)
    assert update_log.closed == 1 and not update_log.members and update_log.num_done == 2
    update_log.join("n", 0, 0.0)
    assert numbers(*(update_log.take("n", 0.0) for _ in range(4))) == [2, 3, 4, 5]


def test_a_warm_start_lets_the_first_worker_begin_alone():
    desk = Desk("downpour:2,2", warm_start=3)
    assert isinstance(desk.take("b"), Wait)
    for _ in range(3):
        desk.commit("a", desk.take("a").number)
    assert isinstance(desk.take("b"), WorkUnit)
    assert UpdateLog.restore(desk.update_log.export()).warm_start == 3


def test_one_that_began_before_the_first_worker_came_hands_in_what_it_has():
    desk = Desk("downpour:2,2", names="", warm_start=3)
    desk.update_log.join("b", 1, 0.0)
    unit = desk.take("b")
    desk.update_log.join("a", 0, 0.0)
    waits = desk.take("b", held=(unit.number,))
    assert isinstance(waits, Wait) and waits.must_commit


def test_departed_workers_are_remembered_up_to_a_number():
    """Every instance that had ever left stayed in the update log, and went into every copy of it."""
    update_log = Desk("bsp", names="").update_log
    for number in range(GONE_KEPT + 5):
        update_log.join(f"worker-{number}", 0, 0.0)
        update_log.leave(f"worker-{number}", 0.0)
    assert update_log.gone[0] == "worker-5" and len(update_log.gone) == len(update_log.export()["gone"]) == GONE_KEPT
    assert isinstance(update_log.join(f"worker-{GONE_KEPT}", 0, 0.0), Refused)


def test_shares_that_wait_for_their_own_worker_are_given_to_nobody_else_in_time():
    """Who keeps a residual decides the bits of a share: a worker that is early takes no other's."""
    desk = Desk("bsp", names="a", own_seconds=60.0)
    assert desk.take("a", 1.0).share == 0
    desk.commit("a", 0, now=2.0)
    digest = desk.update_log.digest()
    waiting = desk.take("a", 3.0, ())
    assert isinstance(waiting, Wait) and waiting.until == 60.0 and "step 0" in waiting.reason
    assert desk.update_log.digest() == digest, "a wait has no place in the row of inputs"
    desk.update_log.join("b", 1, 4.0)
    assert isinstance(desk.take("a", 70.0, ()), Wait), "it is alive, however slow"
    assert UpdateLog.restore(json.loads(json.dumps(desk.update_log.export()))).digest() == desk.update_log.digest()
    assert desk.take("b", 71.0).share == 1
    desk.update_log.leave("b", 72.0)
    assert desk.take("a", 73.0, ()).share == 1, "it will not come back under this name"


def test_shares_of_a_worker_that_never_comes_are_done_by_others_when_their_time_is_over():
    desk = Desk("bsp", names="a", own_seconds=60.0)
    desk.take("a", 1.0)
    desk.commit("a", 0, now=2.0)
    assert isinstance(desk.take("a", 59.0, ()), Wait)
    assert desk.take("a", 61.0, ()).share == 1
    usual = Desk("bsp", names="a")
    usual.take("a", 1.0)
    usual.commit("a", 0, now=2.0)
    assert usual.take("a", 3.0, ()).share == 1, "where nothing is kept nobody waits"
