"""A disk that fills up during a save: both ranks say so, the older checkpoints stay whole, and freed space is used again."""

import os
import subprocess
from pathlib import Path

import pytest

from saving_ranks import Ranks
from shoal.checkpoint.reader import newest_whole, verify
from shoal.checkpoint.space import warn_if_short

DISK_BYTES = 2 * 2**20
# Four tensors of 64 KiB each: a checkpoint of about 256 KiB.
ELEMENTS = 16384


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small disk is not permitted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def free_bytes(path):
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_a_full_disk_costs_no_checkpoint_and_the_next_save_succeeds(tmp_path, disk):
    root = disk / "checkpoints"
    ballast = disk / "ballast"
    with Ranks(tmp_path, root=root, elements=ELEMENTS, keep=2) as ranks:
        for step in (10, 20):
            ranks.ask("save", step)
            assert [outcome["kind"] for outcome in ranks.ask("wait")] == ["checkpoint_saved"] * 2
        kept = ["step-00000010", "step-00000020"]
        # No room for anything; for one rank's shard but not the other's; for both shards but not their end.
        for step, room in ((30, 0), (40, 150_000), (50, 250_000)):
            ballast.write_bytes(b"x" * (free_bytes(disk) - room))
            ranks.ask("save", step)
            outcomes = ranks.ask("wait")
            assert [outcome["kind"] for outcome in outcomes] == ["checkpoint_failed"] * 2
            assert all("No space left on device" in outcome["reason"] for outcome in outcomes)
            assert sorted(path.name for path in root.iterdir()) == kept
            assert [verify(root / name) for name in kept] == [[], []]
            # What the failed save had taken was given back.
            assert free_bytes(disk) >= room - 8192

            ballast.unlink()
            ranks.ask("save", step + 5)
            assert [outcome["kind"] for outcome in ranks.ask("wait")] == ["checkpoint_saved"] * 2
            assert newest_whole(root).path == root / f"step-{step + 5:08d}"
            kept = [kept[-1], f"step-{step + 5:08d}"]


def test_a_disk_that_is_too_small_is_warned_of_before_it_is_used(disk):
    root = disk / "run" / "checkpoints"
    assert warn_if_short(root, DISK_BYTES // 2) is None
    warning = warn_if_short(root, 3 * DISK_BYTES)
    assert "need 6.0 MiB" in warning and "2.0 MiB" in warning and "free 4.0 MiB" in warning
    # Older checkpoints are room too: they expire as new ones come.
    root.mkdir(parents=True)
    Path(root / "old").write_bytes(b"x" * 2**20)
    assert warn_if_short(root, int(1.9 * 2**20)) is None
