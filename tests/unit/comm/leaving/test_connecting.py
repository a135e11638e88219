"""gloo waits inside its constructor for ranks that do not come; whoever made it can stop waiting."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import interrupt_when
from shoal.comm.leaving.connecting import abortable_connecting, connect
from shoal.comm.store.recordfile import RecordFileStore
from shoal.comm.world import join_world
from shoal.core.place import Place


class HalfDead(RecordFileStore):
    """Of two ranks in one process, the store of one that is gone as soon as it has told its address."""

    def wait(self, keys, timeout=None):
        raise RuntimeError("killed")


def build(path, kind=RecordFileStore):
    store = kind(str(path))
    store.set_timeout(timedelta(seconds=30))
    return store


def place(rank):
    return Place(rank=rank, world_size=2, local_rank=rank, local_size=2, launcher="shoal", is_launched=True)


@pytest.fixture
def dead(tmp_path):
    """A store in which the other rank has told its address, and will never connect."""
    store = build(tmp_path / "store", HalfDead)
    prefix = PrefixStore("0/", PrefixStore("epoch-2", store))
    with pytest.raises(RuntimeError):
        c10d.ProcessGroupGloo(PrefixStore("cpu/", prefix), 1, 2, timedelta(seconds=1))
    assert store.num_keys() > 0, "it told its address"
    return tmp_path / "store"


@pytest.mark.timeout(60)
def test_a_rank_that_died_after_it_told_its_address_is_not_waited_for(dead):
    """By whose address is smaller, gloo waits to be connected to, or is refused at once."""
    store = build(dead)
    told = threading.Event()
    threading.Timer(0.3, told.set).start()
    started = time.monotonic()
    with interrupt_when(lambda: "there is a newer view" if told.is_set() else None):
        with pytest.raises((PeerLost, RuntimeError), match=r"there is a newer view|refused"):
            join_world(place(0), deadline_seconds=30, store=PrefixStore("epoch-2", store), device=torch.device("cpu"))
        assert time.monotonic() - started < 10
        assert not dist.is_initialized() and c10d._world.group_count == 0, (
            "the next group has the number of everybody's"
        )


def test_what_connects_for_ever_is_left_to_itself_when_there_is_a_newer_view():
    over, told = threading.Event(), threading.Event()
    threading.Timer(0.05, told.set).start()
    try:
        with interrupt_when(lambda: "there is a newer view" if told.is_set() else None):
            with pytest.raises(PeerLost, match="there is a newer view"):
                connect(over.wait)
            assert connect(lambda: "made") == "made"
    finally:
        over.set()


def test_what_is_made_is_gloos_own_and_torch_is_left_as_it_was(tmp_path):
    original = c10d.ProcessGroupGloo
    with interrupt_when(lambda: None), abortable_connecting():
        made = c10d.ProcessGroupGloo(build(tmp_path / "store"), 0, 1, timedelta(seconds=5))
        assert type(made) is original and isinstance(made, c10d.ProcessGroupGloo)
        with pytest.raises(TypeError):
            c10d.ProcessGroupGloo("no store")
    assert c10d.ProcessGroupGloo is original


def test_where_nobody_follows_a_membership_torch_is_not_touched():
    original = c10d.ProcessGroupGloo
    with abortable_connecting():
        assert c10d.ProcessGroupGloo is original


def test_a_group_that_failed_half_way_is_not_taken_for_the_callers_own(tmp_path, monkeypatch):
    """The ranks of the next view must not find the group of the last one."""

    def fail(*args, **options):
        raise RuntimeError("the second group did not connect")

    monkeypatch.setattr(dist, "new_group", fail)
    store = build(tmp_path / "store")
    alone = Place(rank=0, world_size=1, local_rank=0, local_size=1, launcher="shoal", is_launched=True)
    with pytest.raises(RuntimeError, match="did not connect"):
        join_world(alone, deadline_seconds=5, store=store, device=torch.device("cpu"))
    assert not dist.is_initialized() and c10d._world.group_count == 0
