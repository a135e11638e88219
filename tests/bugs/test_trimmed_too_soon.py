"""A new backup lost the updates that it needed, and asked for them for ever without a word.

The log leader forgets updates that every server has applied, and a server says how far it is with every request. A server
that held one shard at version 20 and was given a copy of another at version 5 was known for its 20 until it asked again; the
updates in between were forgotten in that moment. Its questions were refused, and it tried again, silently, and never applied
another update: the next death would have promoted a backup that stood still.
"""

import asyncio

import pytest

from shoal.paramserver.log import leader as log_leader
from shoal.paramserver.server import store as shard_store
from support.paramserver.job_in_process import running_job

ROUNDS = 20


@pytest.mark.timeout(120)
def test_a_copy_that_took_long_still_finds_its_updates(tmp_path_factory, monkeypatch):
    # Short: the path of a socket has room for a hundred letters.
    folder = tmp_path_factory.mktemp("c")
    monkeypatch.setattr(log_leader, "_UPDATES_KEPT", 0)
    monkeypatch.setattr(shard_store, "PARK_SECONDS", 0.01)
    fetch, arrived, gate = shard_store.ShardStore._fetch, asyncio.Event(), asyncio.Event()

    async def run():
        async with running_job(folder, update="async", servers=2, shares=1, steps=10_000, workers=1) as job:
            await job.until_update(2)
            await job.kill("server-1")

            async def fetch_slowly(self, shard, row_bytes):
                found = await fetch(self, shard, row_bytes)
                if shard == 1 and found is not None:
                    arrived.set()
                    await gate.wait()
                return found

            monkeypatch.setattr(shard_store.ShardStore, "_fetch", fetch_slowly)
            late = (await job.start_server("server-1")).server
            await arrived.wait()
            await job.until_update(len(job.updates) + ROUNDS)
            await job.kill("worker-0")
            # The update log is trimmed at once, and a request for updates is parked for long: so what happens in between is seen.
            monkeypatch.setattr(log_leader, "PARK_SECONDS", 2.5)
            update_log = job.members["server-0"].server.log_leader
            # Its own server, the late one and the clock wait for news of the update log, of which there is none.
            while (
                late.version < len(job.updates)
                or update_log.command_log.update_log.members
                or len(update_log.changed._waiting) < 3
            ):
                await asyncio.sleep(0.01)
            gate.set()
            while any(not one.ready.is_set() or one.version < len(job.updates) for one in late.replicas.values()):
                job.check()
                await asyncio.sleep(0.01)
            assert len(late.replicas) == 2

    async def bounded():
        async with asyncio.timeout(30.0):
            await run()

    asyncio.run(bounded())
