"""The log leader: what it forgets, and how much it tells at once."""

import asyncio

from shoal.comm.wire.message import BODY_BYTES
from shoal.core.updaterule import UpdateRule
from shoal.paramserver.log import leader as log_leader_module
from shoal.paramserver.log.commands import CommandLog
from shoal.paramserver.log.leader import LogLeader
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.messages import OPERATIONS, Followed
from shoal.paramserver.records import Entry, PushRecord, Update


async def nowhere(place, given):
    """An update log without a backup."""


async def keep(*, rule, workers, updates):
    """An update log with so many updates, each with a work unit of every worker."""
    leader = LogLeader(
        CommandLog(UpdateLog(rule=UpdateRule.parse(rule), workers=workers, steps=updates)), replicate=nowhere
    )
    names = [f"{index:016x}" for index in range(workers)]
    for index, name in enumerate(names):
        await leader.join(name, index)
    for number in range(updates):
        for name in names:
            unit = await leader.take(name, ())
            await leader.commit(
                PushRecord(
                    worker=name,
                    number=number,
                    units=(unit.number,),
                    samples=1,
                    weight=1.0,
                    loss=0.5,
                    version=number,
                )
            )
    assert leader.exposed == updates
    return leader


def test_what_was_asked_under_an_earlier_view_does_not_let_updates_be_forgotten(monkeypatch):
    monkeypatch.setattr(log_leader_module, "_UPDATES_KEPT", 0)

    async def run():
        leader = await keep(rule="async", workers=1, updates=20)
        for server in ("a", "b"):
            await leader.updates(18, follower=server, epoch=1)
        # In epoch 2 b was given a copy that is older than what it has.
        await leader.trim({"a", "b"}, epoch=2)
        await leader.updates(18, follower="a", epoch=2)
        await leader.trim({"a", "b"}, epoch=2)
        assert leader.command_log.update_log.first_kept == 0
        assert len(await leader.updates(5, follower="b", epoch=2)) == 15
        await leader.trim({"a", "b"}, epoch=2)
        assert leader.command_log.update_log.first_kept == 5

    asyncio.run(run())


def test_an_answer_with_the_updates_of_many_workers_is_no_longer_than_a_body_may_be():
    entries = tuple(Entry(f"{index:016x}", 3, 1.0) for index in range(500))
    log = [
        Update(
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
    assert len(OPERATIONS.encode(Followed(updates=tuple(log)))) > BODY_BYTES, "all at once would be too long"

    async def run():
        leader = await keep(rule="bsp", workers=1, updates=1)
        leader.command_log.update_log._log, leader.exposed = log, len(log)
        told = []
        while len(told) < len(log):
            updates = await leader.updates(len(told), follower="late", epoch=1)
            assert updates and len(OPERATIONS.encode(Followed(updates=updates))) < BODY_BYTES / 2
            told += updates
        assert told == log

    asyncio.run(run())
