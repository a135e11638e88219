"""The row of inputs: two books that get the same are the same, and a cut can be gone on from."""

import json

from shoal.core.updates import UpdateRule
from shoal.paramserver.log.commands import Input, Ledger, book_after, restart_book
from shoal.paramserver.log.updates import Book
from shoal.paramserver.records import Contribution, Finished, Portion, Wait


def make(rule="bsp", *, workers=2, steps=4, cut_every=0):
    return Ledger(Book(rule=UpdateRule.parse(rule), workers=workers, steps=steps), cut_every=cut_every)


def contribution(worker, number, portion, version):
    return Contribution(
        worker=worker, number=number, portions=(portion.number,), samples=2, weight=2.0, loss=1.0, version=version
    )


class Job:
    """Workers that do portions one after the other, on a ledger and on a copy that is told the same."""

    def __init__(self, ledger, copy=None):
        self.ledger, self.copy, self.now = ledger, copy, 0.0
        self.pushed = {}

    def tell(self, **fields):
        self.now += 1.0
        given = Input(now=self.now, **fields)
        answer = self.ledger.enter(given)
        if self.copy is not None and not isinstance(answer, Wait):
            self.copy.enter(Input.decode(given.encode()))
        return answer

    def do(self, worker, portions):
        for _ in range(portions):
            found = self.tell(kind="take", worker=worker, held=())
            if not isinstance(found, Portion):
                return found
            number = self.pushed[worker] = self.pushed.get(worker, -1) + 1
            self.tell(
                kind="commit",
                worker=worker,
                contribution=contribution(worker, number, found, self.ledger.book.closed),
            )
        return None


def test_a_copy_that_is_told_the_same_is_the_same_and_a_wait_has_no_place_in_the_row():
    job = Job(make(), make())
    job.tell(kind="join", worker="a", number=0)
    job.tell(kind="join", worker="b", number=1)
    first = job.tell(kind="take", worker="a", held=())
    second = job.tell(kind="take", worker="b", held=())
    assert isinstance(first, Portion) and isinstance(second, Portion)
    place = job.ledger.place
    job.tell(kind="commit", worker="a", contribution=contribution("a", 0, first, 0))
    assert isinstance(job.tell(kind="take", worker="a", held=()), Wait)
    assert job.ledger.place == place + 1
    assert job.copy.place == job.ledger.place and job.copy.book.digest() == job.ledger.book.digest()


def test_an_exported_ledger_goes_on_as_the_one_that_it_was_exported_from():
    job = Job(make("async", steps=6, cut_every=4))
    job.tell(kind="join", worker="a", number=0)
    job.do("a", 5)
    again = Job(Ledger.restore(job.ledger.export()), None)
    again.now, again.pushed = job.now, dict(job.pushed)
    job.do("a", 3)
    again.do("a", 3)
    assert again.ledger.book.digest() == job.ledger.book.digest()
    assert again.ledger.cuts == job.ledger.cuts and again.ledger.place == job.ledger.place


def test_cuts_come_every_so_many_portions_and_hold_the_book_as_it_was_then():
    job = Job(make("async", workers=2, steps=6, cut_every=4))
    job.tell(kind="join", worker="a", number=0)
    job.do("a", 10)
    assert sorted(job.ledger.cuts) == [4, 8]
    cut = json.loads(job.ledger.cuts[4])
    assert (cut["trimmed"], cut["log"]) == (4, []), "its rounds are in the weights"


def test_a_book_that_goes_on_from_a_cut_has_done_what_was_in_a_round_and_nothing_else():
    job = Job(make("async", workers=2, steps=3, cut_every=3))
    job.tell(kind="join", worker="a", number=0)
    job.tell(kind="join", worker="b", number=1)
    under_way = job.tell(kind="take", worker="b", held=())
    job.do("a", 3)
    again = restart_book(job.ledger.cuts[3], rule="async", workers=2, steps=3)
    assert again.closed == 3 and again.num_settled == 3 and not again.members
    rest = Job(Ledger(again))
    rest.tell(kind="join", worker="c", number=0)
    done = [rest.tell(kind="take", worker="c", held=()) for _ in range(1)]
    assert done[0].number == under_way.number
    rest.tell(kind="commit", worker="c", contribution=contribution("c", 0, done[0], 3))
    rest.pushed["c"] = 0
    assert isinstance(rest.do("c", 99), Finished)
    assert rest.ledger.book.num_done == 6 and rest.ledger.book.closed == 6


def test_a_cut_of_another_rule_or_another_number_of_workers_counts_by_its_steps():
    job = Job(make("async", workers=2, steps=3, cut_every=4))
    job.tell(kind="join", worker="a", number=0)
    job.do("a", 4)
    assert restart_book(job.ledger.cuts[4], rule="bsp", workers=2, steps=3) is None
    assert restart_book(job.ledger.cuts[4], rule="async", workers=3, steps=3) is None
    book = book_after(2, Book(rule=UpdateRule.parse("async"), workers=2, steps=3), updates_per_step=2)
    assert book.closed == 4 and book.num_settled == 4
    book.join("a", 0, 0.0)
    assert book.take("a", 0.0, ()).step == 2
