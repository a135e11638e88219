"""How the process of a role that was started by itself ends."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from shoal.serverrun.standalone import run_async, run_blocking

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def hang_up_blocking() -> int:
    def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        return ""

    return run_blocking(work)


def hang_up_async() -> int:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        return ""

    return run_async(work)


@pytest.mark.parametrize("hang_up", [hang_up_blocking, hang_up_async])
def test_nohup_is_honoured(hang_up) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert hang_up() == 0


@pytest.mark.parametrize("hang_up", [hang_up_blocking, hang_up_async])
def test_a_terminal_that_goes_away_ends_it_otherwise(hang_up) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert hang_up() == 128 + signal.SIGHUP
