"""Votes of several ranks, as threads over one store; of real processes in tests/chaos/test_save_faults.py."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from shoal.checkpoint.vote import LostTouch, Phase, SaveFailed, Vote
from shoal.core.clock import Deadline


def together(num_ranks, cast):
    """``cast(rank, vote)`` on every rank at once; what each returned or raised."""
    store = dist.HashStore()
    results = [None] * num_ranks

    def run(rank):
        group = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=20))
        try:
            results[rank] = cast(rank, Vote(group, rank=rank, world_size=num_ranks))
        except SaveFailed as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def deadline(seconds=10.0):
    return Deadline(seconds=seconds)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_everyone_hears_everyone(num_ranks):
    texts = [b"", b"one", b"the longest"][:num_ranks]
    results = together(num_ranks, lambda rank, vote: vote.exchange(7, Phase.WRITE, deadline(), text=texts[rank]))
    assert results == [texts] * num_ranks


def test_one_no_is_a_no_for_all_with_its_reason():
    def cast(rank, vote):
        with pytest.raises(SaveFailed, match=r"^rank 1: the disk is füll; rank 2: so is mine$"):
            vote.exchange(
                7, Phase.WRITE, deadline(), problem=[None, "the disk is füll", "so is mine"][rank], text=b"x" * 5000
            )
        # The ranks are still together: the next save can succeed.
        return vote.exchange(8, Phase.BEGIN, deadline())

    assert together(3, cast) == [[b""] * 3] * 3


@pytest.mark.parametrize("ballots", [[(7, Phase.WRITE), (8, Phase.WRITE)], [(7, Phase.WRITE), (7, Phase.COMMIT)]])
def test_ranks_out_of_step_notice(ballots):
    results = together(2, lambda rank, vote: vote.exchange(*ballots[rank], deadline()))
    assert all(isinstance(result, LostTouch) and "do not save together" in str(result) for result in results)


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline():
    done = threading.Event()

    def cast(rank, vote):
        if rank == 1:
            assert done.wait(20)
            return None
        try:
            return vote.exchange(7, Phase.COMMIT, deadline(0.3))
        finally:
            done.set()

    error, _ = together(2, cast)
    assert (
        isinstance(error, LostTouch) and "rank 0, step 7, vote on commit" in str(error) and "within 0.3 s" in str(error)
    )


def test_alone_there_is_nobody_to_wait_for():
    vote = Vote(None, rank=0, world_size=1)
    assert vote.exchange(1, Phase.BEGIN, deadline(), text=b"me") == [b"me"]
    with pytest.raises(SaveFailed, match="rank 0: no"):
        vote.exchange(1, Phase.BEGIN, deadline(), problem="no")
