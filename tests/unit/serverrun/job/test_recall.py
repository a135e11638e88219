"""Workers that were done are started again when a server dies, and what is left of them is no further death."""

import asyncio
import os
from types import SimpleNamespace

from shoal.serverrun.job.job import Job, JobRequest


class FakeProcess:
    def __init__(self, name, on_end):
        self.name, self.pid, self.exit_code, self.on_end = name, os.getpid(), None, on_end

    @property
    def is_running(self):
        return self.exit_code is None


class FakeSpawner:
    """Starts nothing. Who is ended is told of at once, as the event loop does, and waited for a moment longer."""

    def __init__(self):
        self.started = []

    async def start(self, module, arguments, *, name, on_end, **others):
        self.started.append(name)
        return FakeProcess(name, on_end)

    async def end(self, processes):
        for process in processes:
            if process.is_running:
                process.exit_code = -9
                process.on_end()
        await asyncio.sleep(0.05)

    def look(self):
        pass


def test_a_rank_of_a_recalled_worker_that_still_runs_is_no_death(tmp_path):
    display = SimpleNamespace(update=lambda states: None, message=print)
    request = JobRequest(
        run_dir=tmp_path,
        num_servers=1,
        num_workers=1,
        ranks_per_worker=2,
        num_centers=1,
        threads=1,
        resume=False,
        max_respawns=10,
        stop_grace=1.0,
        display=display,
        closing=None,
    )

    async def run():
        job = Job(request)
        job._spawner = spawner = FakeSpawner()
        try:
            worker = next(member for member in job._members if member.name == "worker-0")
            await job._start(worker)
            # Its first rank is done, its second is about to be.
            worker.process.exit_code = 0
            job._take_done(worker, is_done=True)
            job._recall_workers()
            for _ in range(5):
                await job._turn()
            return spawner.started, job._num_deaths
        finally:
            await job._node.close()
            job._board.close()
            job._folder.remove()

    assert asyncio.run(run()) == (["worker-0", "worker-0.1"] * 2, 0)
