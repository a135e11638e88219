"""Hosts that do not reach each other are named before gloo connects."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from shoal.comm.network.ways import check_ways, spans_hosts
from shoal.core.errors import RunError
from shoal.core.place import Place

HERE = "127.0.0.1"


def place(rank: int, *, local_rank: int = 0, local_size: int = 1, world_size: int = 2) -> Place:
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, local_size=local_size, is_launched=True)


@pytest.fixture
def store() -> HashStore:
    found = HashStore()
    found.set_timeout(timedelta(seconds=10))
    return found


@pytest.fixture
def silent_port() -> Iterator[int]:
    """One that drops whoever connects, as a firewall does: its queue is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind((HERE, 0))
        listener.listen(0)
        for line in (first, second):
            line.setblocking(False)
            line.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_hosts_that_reach_each_other_go_on_and_ranks_that_are_not_first_do_not_wait(store: HashStore) -> None:
    ranks = [place(number, local_rank=number % 2, local_size=2, world_size=4) for number in range(4)]
    check_ways(ranks[1], store, HERE)  # no other rank has come yet
    others = [threading.Thread(target=check_ways, args=(one, store, HERE)) for one in ranks[2:]]
    for one in others:
        one.start()
    check_ways(ranks[0], store, HERE)
    for one in others:
        one.join(10)
        assert not one.is_alive()
    assert [bool(store.get(f"way/{number}")) for number in range(4)] == [True, False, True, False]


def test_a_host_that_does_not_answer_is_named_in_time(store: HashStore, silent_port: int) -> None:
    store.set("way/1", f"{HERE} {silent_port} node7")
    began = time.monotonic()
    with pytest.raises(RunError, match=r"does not reach node7 \(127\.0\.0\.1\): no answer within 0\.3 s; .*--network"):
        check_ways(place(0), store, HERE, seconds=0.3)
    assert time.monotonic() - began < 5


def test_a_host_that_listens_no_more_was_reached(store: HashStore) -> None:
    with socket.create_server((HERE, 0)) as gone:
        port = gone.getsockname()[1]
    store.set("way/1", f"{HERE} {port} node7")
    check_ways(place(0), store, HERE, seconds=0.3)


def test_a_host_whose_address_is_not_known_is_not_tried(store: HashStore) -> None:
    store.set("way/1", "")
    check_ways(place(0), store, HERE)
    check_ways(place(0), store, "")


def test_a_stranger_gets_no_byte(store: HashStore) -> None:
    waiting = threading.Thread(target=check_ways, args=(place(0), store, HERE))
    waiting.start()
    port = int(store.get("way/0").split()[1])
    with socket.create_connection((HERE, port), timeout=5) as stranger:
        assert stranger.recv(1) == b""
    store.set("way/1", "")
    waiting.join(10)
    assert not waiting.is_alive()


def test_only_ranks_of_several_hosts_try() -> None:
    assert spans_hosts(place(0)) and spans_hosts(Place(rank=0, world_size=2))
    assert not spans_hosts(place(0, local_size=2)) and not spans_hosts(Place())
