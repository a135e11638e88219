"""The processes of a job with parameter servers: children of the job, and told of when they end."""

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


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_process_is_ours_and_orphans_of_others_are_not(tmp_path: Path, is_forked: bool) -> None:
    async def run() -> tuple[bool, int | None]:
        spawner = Spawner({**os.environ, "SHOAL_SUPERVISOR_PID": str(os.getpid())}, descriptors=())
        ended = asyncio.Event()
        spawner.open()
        try:
            process = await spawner.start(
                "nothing.of.this.name", [], name="x", log=tmp_path / "log", on_end=ended.set, is_forked=is_forked
            )
            adopts = adopts_orphans()
            await asyncio.wait_for(ended.wait(), timeout=30)
        finally:
            spawner.close()
        return adopts, process.exit_code

    # Its own code, which only a parent is told.
    assert asyncio.run(asyncio.wait_for(run(), timeout=60)) == (False, 1)
    assert "nothing" in (tmp_path / "log").read_text()
