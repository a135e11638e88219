"""A disk that fills up during a save: both ranks say so, the older checkpoints stay whole, and freed space is used again."""

import os
import subprocess
from pathlib import Path

import pytest

from shoal.checkpoint.reader import newest_whole, verify
from shoal.checkpoint.saver import warn_if_short
from support.checkpoint.saving_ranks import Ranks
from support.processes.command import read_events, read_summary, wait_until

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
    # Lazily: what a test that failed has left running may still be in there.
    subprocess.run(["umount", "--lazy", path], check=True)


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
            assert [verify(root / name) for name in kept] == [[]] * len(kept)
            # What the failed save had taken was given back.
            assert free_bytes(disk) >= room - 8192

            ballast.unlink()
            ranks.ask("save", step + 5)
            assert [outcome["kind"] for outcome in ranks.ask("wait")] == ["checkpoint_saved"] * 2
            assert newest_whole(root).path == root / f"step-{step + 5:08d}"
            # The newest two, and the oldest: no step was taken from any, so none of them is known to be good.
            kept = ["step-00000010", kept[-1], f"step-{step + 5:08d}"]


def test_a_disk_that_is_too_small_is_warned_of_before_it_is_used(disk):
    root = disk / "run" / "checkpoints"
    assert warn_if_short(root, DISK_BYTES // 2) is None
    warning = warn_if_short(root, 3 * DISK_BYTES)
    assert "need 6.0 MiB" in warning and "2.0 MiB" in warning and "free 4.0 MiB" in warning
    # Older checkpoints are room too: they expire as new ones come.
    root.mkdir(parents=True)
    Path(root / "old").write_bytes(b"x" * 2**20)
    assert warn_if_short(root, int(1.9 * 2**20)) is None


def outcomes(run_dir, rank, kind):
    return [event["step"] for event in read_events(run_dir, rank, kind)]


def test_a_run_trains_on_while_its_disk_is_full_and_saves_again_when_it_is_not(shoal, tiny, disk):
    """Through the command: a checkpoint here has half a megabyte, and events need a little of what is left."""
    run, ballast = disk / "run", disk / "ballast"
    root = run / "checkpoints"

    def fill():
        ballast.write_bytes(b"x" * (free_bytes(disk) - 120_000))

    fill()
    options = ("--set", "train.steps=100000", "--set", "checkpoint.every=20", "--set", "checkpoint.keep=1")
    process = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", run, *options)
    wait_until(lambda: all(outcomes_of(run, "checkpoint_failed")), "a save that fails on both ranks")
    assert not root.exists() or newest_whole(root).path is None
    ballast.unlink()
    wait_until(lambda: all(outcomes_of(run, "checkpoint_saved")), "a save when there is room")
    fill()
    since = max(outcomes(run, 0, "checkpoint_saved"))
    wait_until(lambda: max(outcomes(run, 0, "checkpoint_failed")) > since, "another save that fails")
    failed = max(outcomes(run, 0, "checkpoint_failed"))
    wait_until(lambda: max(event["step"] for event in read_events(run, 1, "step")) > failed, "a step after it")
    kept = newest_whole(root)
    assert kept.path is not None and kept.refused == () and verify(kept.path) == []
    ballast.unlink()
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    # Before the first step, and once for all ranks.
    warned = stderr.index("warning: checkpoints in")
    assert "free " in stderr[warned:] and warned < stderr.index("was not saved"), stderr
    assert "No space left on device" in stderr and "training goes on" in stderr
    last = newest_whole(root).path
    assert last.name == f"step-{read_summary(run)['steps']:08d}" and verify(last) == []


def outcomes_of(run_dir, kind):
    """By rank; nothing before both have begun to tell."""
    ready = all((run_dir / "events" / f"rank-{rank:03d}.jsonl").exists() for rank in (0, 1))
    return [outcomes(run_dir, rank, kind) for rank in (0, 1)] if ready else [[]]
