"""The starter of a job's processes: children by adoption, and a process that is left as it was found."""

import asyncio
import ctypes
import os
from pathlib import Path

import pytest

from shoal.serverrun.job.processes import Spawner

PR_GET_CHILD_SUBREAPER = 37
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="orphans are adopted on Linux only")


def adopts_orphans() -> bool:
    answer = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0
    return bool(answer.value)


def test_a_process_from_the_nursery_is_ours_and_orphans_are_adopted_no_longer_afterwards(tmp_path: Path) -> None:
    async def run() -> tuple[bool, int]:
        spawner = Spawner({**os.environ, "SHOAL_SUPERVISOR_PID": str(os.getpid())}, descriptors=())
        ended = asyncio.Event()
        try:
            process = await spawner.start("nothing.of.this.name", [], log=tmp_path / "log", on_end=ended.set)
            during = adopts_orphans()
            code = await process.wait()
            await asyncio.wait_for(ended.wait(), timeout=30)
        finally:
            await spawner.close()
        return during, code

    before = adopts_orphans()
    during, code = asyncio.run(asyncio.wait_for(run(), timeout=60))
    assert (during, adopts_orphans()) == (True, before)
    # Its own code, which only a parent is told.
    assert code == 1
    assert "nothing" in (tmp_path / "log").read_text()
