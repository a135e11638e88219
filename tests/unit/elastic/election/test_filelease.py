"""The election on one machine, in one process: locks belong to open files, so two candidates here are as apart as processes."""

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.elector import Center, Deposed
from shoal.elastic.election.filelease import (
    FileLease,
    boot_seconds,
    find_center,
    lease_path,
    list_epochs,
    read_center,
    take_epoch,
)


def candidate(folder: Path, name: str = "a", lease_seconds: float = 30.0) -> FileLease:
    return FileLease(folder, name=name, address=f"ipc://{name}", lease_seconds=lease_seconds)


def test_one_candidate(tmp_path: Path) -> None:
    async def run() -> None:
        one = candidate(tmp_path / "new" / "folder")
        assert read_center(tmp_path / "nowhere") is None and not one.is_valid() and one.epoch == 0
        assert await one.campaign() == 1
        assert one.is_valid()
        assert [await one.advance() for _ in range(8)] == list(range(2, 10))
        assert one.epoch == 9 and one.is_valid()
        assert read_center(one.folder) == Center(epoch=9, address="ipc://a", name="a")
        assert list_epochs(one.folder) == [5, 6, 7, 8, 9], "old ones are swept"
        await one.resign()
        assert not one.is_valid() and read_center(one.folder) is None

    asyncio.run(run())


def test_the_next_one_leads_when_the_first_resigns(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = candidate(tmp_path), candidate(tmp_path, "b")
        await first.campaign()
        waiting = asyncio.create_task(second.campaign())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.1)
        await first.resign()
        assert await waiting == 2
        assert (await find_center(tmp_path, deadline=Deadline(seconds=1.0))).name == "b"
        with pytest.raises(Deposed, match="'a' was deposed from epoch 1: it does not lead"):
            await first.renew()

    asyncio.run(run())


def test_a_lease_that_ran_out_is_never_renewed(tmp_path: Path) -> None:
    async def run() -> None:
        one = candidate(tmp_path, lease_seconds=0.2)
        await one.campaign()
        while one.is_valid():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert read_center(tmp_path) is None
        for change in (one.renew, one.advance):
            with pytest.raises(Deposed):
                await change()
        assert await one.campaign() == 2, "it may stand again"

    asyncio.run(run())


def test_a_challenger_waits_for_a_renewal_that_crossed_its_claim(tmp_path: Path) -> None:
    """The leader stamped after the challenger had found the lease run out: the challenger has the epoch, and must wait."""

    async def run() -> None:
        leader = candidate(tmp_path, lease_seconds=0.5)
        await leader.campaign()
        challenger = candidate(tmp_path, "b", lease_seconds=0.5)
        challenger._held = challenger._take(2)
        assert leader.is_valid() and not challenger._attempt() and not challenger.is_valid()
        with pytest.raises(Deposed, match="not the newest"):
            await leader.renew()
        assert not leader.is_valid() and challenger._attempt() and challenger.is_valid()

    asyncio.run(run())


def test_a_swept_epoch_cannot_come_back(tmp_path: Path) -> None:
    """A candidate that was paused before it linked takes a name that is free again."""

    async def run() -> None:
        leader = candidate(tmp_path)
        await leader.campaign()
        for _ in range(9):
            await leader.advance()
        paused = candidate(tmp_path, "b")
        paused._held = paused._take(3)
        assert paused._held is not None and not paused._attempt() and not paused.is_valid()
        assert 3 not in list_epochs(tmp_path)
        await leader.renew()

    asyncio.run(run())


def test_advance_after_a_claim_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        leader = candidate(tmp_path)
        await leader.campaign()
        claim = take_epoch(tmp_path, 2, name="b", address="ipc://b", lease_seconds=30.0)
        with pytest.raises(Deposed, match="another candidate took epoch 2"):
            await leader.advance()
        assert not leader.is_valid()
        claim.release()

    asyncio.run(run())


def test_what_a_crash_leaves_blocks_nobody(tmp_path: Path) -> None:
    """Between making, locking and linking a file: an empty one, a whole one that was never linked, and an empty epoch."""
    (tmp_path / "candidate-00.lease").touch()
    (tmp_path / "candidate-01.lease").write_text("garbage")
    lease_path(tmp_path, 4).touch()
    (tmp_path / "epoch-x.lease").touch()
    living = tmp_path / "candidate-02.lease"
    living.touch()

    async def run() -> None:
        descriptor = os.open(living, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        one = candidate(tmp_path)
        assert await asyncio.wait_for(one.campaign(), 1.0) == 5
        assert sorted(path.name for path in tmp_path.glob("candidate-*")) == ["candidate-02.lease"], (
            "a living one is left"
        )
        os.close(descriptor)

    asyncio.run(run())


def test_a_cancelled_campaign_holds_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        leader = candidate(tmp_path, lease_seconds=2.0)
        await leader.campaign()
        other = candidate(tmp_path, "b")
        other._held = other._take(2)
        waiting = asyncio.create_task(other.campaign())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert read_center(tmp_path) is None and other._held is None

    asyncio.run(run())


def test_removed_files_depose(tmp_path: Path) -> None:
    async def run() -> None:
        one = candidate(tmp_path)
        await one.campaign()
        lease_path(tmp_path, 1).unlink()
        with pytest.raises(Deposed, match="not the newest"):
            await one.renew()

    asyncio.run(run())


def test_a_stamp_caught_in_a_write_is_read_again(tmp_path: Path) -> None:
    held = take_epoch(tmp_path, 1, name="a", address="ipc://a", lease_seconds=30.0)
    for now in (1.5, boot_seconds()):
        held.stamp(now)
    assert read_center(tmp_path).name == "a"
    held.stamp(boot_seconds() - 31.0)
    assert read_center(tmp_path) is None
    held.release()


def test_nobody_leads(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"waited 0.05 s for a center to be elected in .*"):
        asyncio.run(find_center(tmp_path, deadline=Deadline(seconds=0.05)))


def test_too_short_a_lease(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"0.1 s is shorter than 0.2 s"):
        candidate(tmp_path, lease_seconds=0.1)
