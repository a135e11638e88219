"""The row of inputs: two update logs that get the same are the same, and a cut can be gone on from."""

import json

from shoal.core.updaterule import UpdateRule
from shoal.paramserver.log.commands import Command, CommandLog, restart_update_log, update_log_after
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import Finished, PushRecord, Wait, WorkUnit


def make(rule="bsp", *, workers=2, steps=4, cut_every=0):
    return CommandLog(UpdateLog(rule=UpdateRule.parse(rule), workers=workers, steps=steps), cut_every=cut_every)


def push(worker, number, unit, version):
    return PushRecord(
        worker=worker, number=number, units=(unit.number,), samples=2, weight=2.0, loss=1.0, version=version
    )


class Job:
    """Workers that do work units one after the other, on a command log and on a copy that is told the same."""

    def __init__(self, command_log, copy=None):
        self.command_log, self.copy, self.now = command_log, copy, 0.0
        self.pushed = {}

    def tell(self, **fields):
        self.now += 1.0
        given = Command(now=self.now, **fields)
        answer = self.command_log.enter(given)
        if self.copy is not None and not isinstance(answer, Wait):
            self.copy.enter(Command.decode(given.encode()))
        return answer

    def do(self, worker, units):
        for _ in range(units):
            found = self.tell(kind="take", worker=worker, held=())
            if not isinstance(found, WorkUnit):
                return found
            number = self.pushed[worker] = self.pushed.get(worker, -1) + 1
            self.tell(
                kind="commit",
                worker=worker,
                push=push(worker, number, found, self.command_log.update_log.closed),
            )
        return None


def test_a_copy_that_is_told_the_same_is_the_same_and_a_wait_has_no_place_in_the_row():
    job = Job(make(), make())
    job.tell(kind="join", worker="a", number=0)
    job.tell(kind="join", worker="b", number=1)
    first = job.tell(kind="take", worker="a", held=())
    second = job.tell(kind="take", worker="b", held=())
    assert isinstance(first, WorkUnit) and isinstance(second, WorkUnit)
    place = job.command_log.place
    job.tell(kind="commit", worker="a", push=push("a", 0, first, 0))
    assert isinstance(job.tell(kind="take", worker="a", held=()), Wait)
    assert job.command_log.place == place + 1
    assert (
        job.copy.place == job.command_log.place and job.copy.update_log.digest() == job.command_log.update_log.digest()
    )


def test_an_exported_command_log_goes_on_as_the_one_that_it_was_exported_from():
    job = Job(make("async", steps=6, cut_every=4))
    job.tell(kind="join", worker="a", number=0)
    job.do("a", 5)
    again = Job(CommandLog.restore(job.command_log.export()), None)
    again.now, again.pushed = job.now, dict(job.pushed)
    job.do("a", 3)
    again.do("a", 3)
    assert again.command_log.update_log.digest() == job.command_log.update_log.digest()
    assert again.command_log.cuts == job.command_log.cuts and again.command_log.place == job.command_log.place


def test_cuts_come_every_so_many_units_and_hold_the_update_log_as_it_was_then():
    job = Job(make("async", workers=2, steps=6, cut_every=4))
    job.tell(kind="join", worker="a", number=0)
    job.do("a", 10)
    assert sorted(job.command_log.cuts) == [4, 8]
    cut = json.loads(job.command_log.cuts[4])
    assert (cut["trimmed"], cut["log"]) == (4, []), "its updates are in the weights"


def test_an_update_log_that_goes_on_from_a_cut_has_done_what_was_in_an_update_and_nothing_else():
    job = Job(make("async", workers=2, steps=3, cut_every=3))
    job.tell(kind="join", worker="a", number=0)
    job.tell(kind="join", worker="b", number=1)
    under_way = job.tell(kind="take", worker="b", held=())
    job.do("a", 3)
    again = restart_update_log(job.command_log.cuts[3], rule="async", workers=2, steps=3)
    assert again.closed == 3 and again.num_settled == 3 and not again.members
    rest = Job(CommandLog(again))
    rest.tell(kind="join", worker="c", number=0)
    done = [rest.tell(kind="take", worker="c", held=()) for _ in range(1)]
    assert done[0].number == under_way.number
    rest.tell(kind="commit", worker="c", push=push("c", 0, done[0], 3))
    rest.pushed["c"] = 0
    assert isinstance(rest.do("c", 99), Finished)
    assert rest.command_log.update_log.num_done == 6 and rest.command_log.update_log.closed == 6


def test_a_cut_of_another_rule_or_another_number_of_workers_counts_by_its_steps():
    job = Job(make("async", workers=2, steps=3, cut_every=4))
    job.tell(kind="join", worker="a", number=0)
    job.do("a", 4)
    assert restart_update_log(job.command_log.cuts[4], rule="bsp", workers=2, steps=3) is None
    assert restart_update_log(job.command_log.cuts[4], rule="async", workers=3, steps=3) is None
    update_log = update_log_after(2, UpdateLog(rule=UpdateRule.parse("async"), workers=2, steps=3), updates_per_step=2)
    assert update_log.closed == 4 and update_log.num_settled == 4
    update_log.join("a", 0, 0.0)
    assert update_log.take("a", 0.0, ()).step == 2
