"""What ranks of a launcher must have in common before their first step."""

import json
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from shoal.core.errors import AgreedError
from shoal.trainer.admission.facts import find_difference, pass_admission

FACTS = {"host": "a", "shoal": "1", "torch": "2", "python": "3", "code": "c", "recipe": "r"}


@pytest.mark.parametrize("name", ["shoal", "torch", "python", "code", "recipe"])
def test_all_ranks_are_told_of_the_one_that_differs(name: str) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    raised: dict[int, str] = {}

    def enter(rank: int) -> None:
        own = {**FACTS, **({"host": "b", name: "other"} if rank == 1 else {})}
        try:
            pass_admission(store, own, rank=rank, world_size=2, seconds=10)
        except AgreedError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert raised[0] == raised[1] and raised[0].startswith("rank 1 on host b has ")


def test_ranks_that_have_the_same_pass() -> None:
    store = HashStore()
    assert find_difference({0: FACTS, 1: {**FACTS, "host": "b"}}) == ""
    assert pass_admission(store, FACTS, rank=0, world_size=1, seconds=5) == ["a"]
    assert json.loads(store.get("door/verdict"))["error"] == ""
