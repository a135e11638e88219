"""The keeper of the book: what it forgets, and how much it tells at once."""

import asyncio

from shoal.comm.wire.message import BODY_BYTES
from shoal.core.updates import UpdateRule
from shoal.paramserver.log import leader as steward_module
from shoal.paramserver.log.commands import Ledger
from shoal.paramserver.log.leader import Steward
from shoal.paramserver.log.updates import Book
from shoal.paramserver.messages import OPERATIONS, Followed
from shoal.paramserver.records import Contribution, Entry, Round


async def nowhere(place, given):
    """A book without a backup."""


async def keep(*, rule, workers, rounds):
    """A book with so many rounds, each with a portion of every worker."""
    keeper = Steward(Ledger(Book(rule=UpdateRule.parse(rule), workers=workers, steps=rounds)), replicate=nowhere)
    names = [f"{index:016x}" for index in range(workers)]
    for index, name in enumerate(names):
        await keeper.join(name, index)
    for number in range(rounds):
        for name in names:
            portion = await keeper.take(name, ())
            await keeper.commit(
                Contribution(
                    worker=name,
                    number=number,
                    portions=(portion.number,),
                    samples=1,
                    weight=1.0,
                    loss=0.5,
                    version=number,
                )
            )
    assert keeper.exposed == rounds
    return keeper


def test_what_was_asked_under_an_earlier_view_does_not_let_rounds_be_forgotten(monkeypatch):
    monkeypatch.setattr(steward_module, "_ROUNDS_KEPT", 0)

    async def run():
        keeper = await keep(rule="async", workers=1, rounds=20)
        for server in ("a", "b"):
            await keeper.rounds(18, follower=server, epoch=1)
        # In epoch 2 b was given a copy that is older than what it has.
        await keeper.trim({"a", "b"}, epoch=2)
        await keeper.rounds(18, follower="a", epoch=2)
        await keeper.trim({"a", "b"}, epoch=2)
        assert keeper.ledger.book.first_kept == 0
        assert len(await keeper.rounds(5, follower="b", epoch=2)) == 15
        await keeper.trim({"a", "b"}, epoch=2)
        assert keeper.ledger.book.first_kept == 5

    asyncio.run(run())


def test_an_answer_with_the_rounds_of_many_workers_is_no_longer_than_a_body_may_be():
    entries = tuple(Entry(f"{index:016x}", 3, 1.0) for index in range(500))
    log = [
        Round(
            number=number,
            entries=entries,
            loss=0.5,
            weight=1.0,
            samples=500,
            first_step=number,
            last_step=number,
            staleness=0,
        )
        for number in range(100)
    ]
    assert len(OPERATIONS.encode(Followed(rounds=tuple(log)))) > BODY_BYTES, "all at once would be too long"

    async def run():
        keeper = await keep(rule="bsp", workers=1, rounds=1)
        keeper.ledger.book._log, keeper.exposed = log, len(log)
        told = []
        while len(told) < len(log):
            rounds = await keeper.rounds(len(told), follower="late", epoch=1)
            assert rounds and len(OPERATIONS.encode(Followed(rounds=rounds))) < BODY_BYTES / 2
            told += rounds
        assert told == log

    asyncio.run(run())
