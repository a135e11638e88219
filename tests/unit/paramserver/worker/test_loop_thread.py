"""The loop of a worker's wire: it ends with what is still under way in it."""

import asyncio
import gc
import threading
from concurrent.futures import CancelledError

import pytest

from shoal.paramserver.worker.client import LoopThread


async def _wait(begun: threading.Event, ended: list[str]) -> None:
    begun.set()
    try:
        await asyncio.sleep(60)
    finally:
        ended.append("ended")


def test_what_is_under_way_is_ended_before_the_loop_is(caplog):
    """The interpreter said "Task was destroyed but it is pending!" of a push that a worker's end overtook."""
    thread, begun, ended = LoopThread(), threading.Event(), []
    under_way = thread.start(_wait(begun, ended))
    assert begun.wait(10)
    thread.close()
    gc.collect()
    assert ended == ["ended"] and "pending" not in caplog.text
    with pytest.raises(CancelledError):
        under_way.result(timeout=10)


def test_a_last_thing_that_fails_leaves_no_thread_behind():
    thread = LoopThread("failing")

    async def fail() -> None:
        raise ValueError("the last thing")

    with pytest.raises(ValueError, match="the last thing"):
        thread.close(fail)
    assert not any(one.name == "failing" for one in threading.enumerate())
