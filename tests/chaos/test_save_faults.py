"""Faults of one rank in a save of two: a failing fsync, a death, a stop. Nobody hangs, and nothing older is lost."""

import os
import shutil
import signal

import pytest
import torch

from shoal.checkpoint.commit import sweep, write_checkpoint
from shoal.checkpoint.pieces import as_blob
from shoal.checkpoint.reader import newest_whole, read
from support.checkpoint.saving_ranks import Ranks

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def kinds(outcomes):
    return [outcome["kind"] for outcome in outcomes]


def leftovers(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def filled_with(path):
    weights = [tensor for name, tensor in read(path).tensors.items() if name.startswith("weights/")]
    values = {float(value) for tensor in weights for value in tensor.unique()}
    assert len(values) == 1
    return values.pop()


@needs_strace
def test_an_fsync_that_fails_on_one_rank_fails_the_save_on_both_and_the_next_one_succeeds(tmp_path):
    # The writing thread lives as long as the saver, so its first fsync is the only one that fails.
    strace = ("strace", "-f", "-o", os.devnull, "-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=1")
    root = tmp_path / "checkpoints"
    with Ranks(tmp_path, under={1: strace}) as ranks:
        ranks.ask("fill", 1)
        assert ranks.ask("save", 10) == ["returned"] * 2
        outcomes = ranks.ask("wait")
        assert kinds(outcomes) == ["checkpoint_failed"] * 2
        assert all("rank 1: cannot write its shard: Input/output error" in outcome["reason"] for outcome in outcomes)
        assert newest_whole(root).path is None and leftovers(root) == []

        ranks.ask("fill", 2)
        ranks.ask("save", 20)
        assert kinds(ranks.ask("wait")) == ["checkpoint_saved"] * 2
        assert filled_with(newest_whole(root).path) == 2.0
        events = ranks.ask("events")
        assert [kinds(rank) for rank in events] == [["checkpoint_failed", "checkpoint_saved"]] * 2
        assert ranks.ask("close") == ["closed"] * 2


def test_a_rank_that_dies_before_its_vote_fails_the_save_and_the_survivor_goes_on(tmp_path):
    root = tmp_path / "checkpoints"
    with Ranks(tmp_path) as ranks:
        ranks.ask("fill", 1)
        ranks.ask("save", 10)
        assert kinds(ranks.ask("wait")) == ["checkpoint_saved"] * 2
        # Rank 1 never comes to the vote of step 20: rank 0 is already waiting for it when it dies.
        assert ranks[0].ask("save", 20) == "returned"
        ranks[1].process.kill()
        outcome = ranks[0].ask("wait")
        assert outcome["kind"] == "checkpoint_failed" and "rank 0, step 20, vote on begin" in outcome["reason"]
        assert leftovers(root) == [] and filled_with(newest_whole(root).path) == 1.0
        # The loop is told at once that there is nobody left to save with; it does not wait a deadline each time.
        assert ranks[0].ask("save", 30) == "returned"
        assert "restart the run" in ranks[0].ask("wait")["reason"]
        assert ranks[0].ask("close") == "closed"


def test_a_rank_that_stops_ends_the_save_at_the_deadline(tmp_path):
    root = tmp_path / "checkpoints"
    with Ranks(tmp_path, deadline_s=2.0) as ranks:
        ranks[1].process.send_signal(signal.SIGSTOP)
        assert ranks[0].ask("save", 10) == "returned"
        outcome = ranks[0].ask("wait")
        assert outcome["kind"] == "checkpoint_failed" and "within 2 s" in outcome["reason"]
        assert leftovers(root) == []
        assert ranks[0].ask("close") == "closed"
        # The one that was stopped comes to a vote that nobody attends any more; it does not hang either.
        ranks[1].process.send_signal(signal.SIGCONT)
        ranks[1].ask("save", 10)
        assert ranks[1].ask("wait")["kind"] == "checkpoint_failed"
        assert ranks[1].ask("close") == "closed"


@needs_strace
@pytest.mark.parametrize("which", [1, 2], ids=["before the old one is set aside", "before the new one has its name"])
def test_rank_0_killed_at_a_rename_leaves_the_truth_on_the_disk(tmp_path, which):
    root = tmp_path / "checkpoints"
    write_checkpoint(root, step=10, ranks=[{"weights/0": as_blob(torch.ones(5))}], values={})
    # Step 10 again: the first rename sets the old one aside, the second gives the new one its name.
    strace = ("strace", "-f", "-o", os.devnull, "-e", "trace=rename", "-e", f"inject=rename:signal=KILL:when={which}")
    with Ranks(tmp_path, under={0: strace}) as ranks:
        ranks.ask("fill", 2)
        for rank in ranks:
            rank.tell("save", 10)
        assert ranks[1].hear() == "returned"
        outcome = ranks[1].ask("wait")
        assert outcome["kind"] == "checkpoint_failed" and "vote on commit" in outcome["reason"]
        assert ranks[1].ask("close") == "closed"
    assert filled_with(newest_whole(root).path) == 1.0
    sweep(root)
    assert leftovers(root) == [] and filled_with(newest_whole(root).path) == 1.0


def test_ranks_that_save_different_steps_notice_it(tmp_path):
    with Ranks(tmp_path) as ranks:
        ranks[0].tell("save", 10)
        ranks[1].tell("save", 20)
        assert [rank.hear() for rank in ranks] == ["returned"] * 2
        outcomes = ranks.ask("wait")
        assert kinds(outcomes) == ["checkpoint_failed"] * 2
        assert all("the ranks do not save together" in outcome["reason"] for outcome in outcomes)
        assert newest_whole(tmp_path / "checkpoints").path is None and leftovers(tmp_path / "checkpoints") == []
