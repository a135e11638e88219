"""Ranks agree on which start of the run they are in, whatever an earlier start has left in the store."""

import threading

import pytest
from torch.distributed import HashStore, PrefixStore

from shoal.comm.store.beats import Beats
from shoal.comm.store.rounds import agree_on_round
from shoal.core.errors import RunError


def start(store: HashStore, size: int, seconds: float = 20.0) -> list[int]:
    found: dict[int, int] = {}

    def join(rank: int) -> None:
        found[rank] = agree_on_round(store, rank=rank, world_size=size, host=f"h{rank}", seconds=seconds)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return [found[rank] for rank in range(size)]


def test_every_start_has_one_number_for_all_ranks_and_a_new_one() -> None:
    store = HashStore()
    numbers = [start(store, 3) for _ in range(5)]
    assert all(len(set(found)) == 1 for found in numbers)
    firsts = [found[0] for found in numbers]
    assert firsts[0] == 0 and sorted(set(firsts)) == firsts


def test_a_rank_that_does_not_come_is_named_with_those_that_did() -> None:
    with pytest.raises(RunError, match=r"rank 1 of 2 did not come within 0.2 s \(rank 0 on here did\)"):
        agree_on_round(HashStore(), rank=0, world_size=2, host="here", seconds=0.2)


@pytest.mark.soak
def test_a_rank_that_is_silent_is_named_and_all_end_within_the_lease() -> None:
    store = HashStore()
    said: dict[int, str] = {}
    done = [threading.Event() for _ in range(2)]

    def end(rank: int):
        return lambda text: (said.__setitem__(rank, text), done[rank].set())

    # Rank 2 has beaten once, and never again.
    PrefixStore("r", store).set("beat/2", "1")
    hosts = ["a", "b", "c"]
    watching = [
        Beats(PrefixStore("r", store), rank=rank, hosts=hosts, lease_seconds=0.5, end=end(rank)) for rank in range(2)
    ]
    assert all(event.wait(10) for event in done)
    for beats in watching:
        beats.close()
    assert all("rank 2 on host c: gave no sign of life" in text for text in said.values()), said


def test_the_first_failure_is_what_everybody_hears() -> None:
    store = HashStore()
    watching = [
        Beats(PrefixStore("r", store), rank=rank, hosts=["a", "b"], lease_seconds=20, end=lambda text: None)
        for rank in range(2)
    ]
    watching[1].post("the disk is full")
    watching[0].post("a peer is gone")
    failure = watching[0].await_failure(10)
    for beats in watching:
        beats.close()
    assert str(failure) == "rank 1 on host b: the disk is full"
