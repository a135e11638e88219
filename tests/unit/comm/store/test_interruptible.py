"""Keys that nobody will set are waited for until there is a reason not to."""

import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import interrupt_when
from shoal.comm.store.interruptible import InterruptibleStore


def build(path, seconds=20.0):
    store = InterruptibleStore(FileStore(str(path), 2))
    store.set_timeout(timedelta(seconds=seconds))
    return store


def test_keys_are_those_of_the_store_within(tmp_path):
    store, other = build(tmp_path / "store"), FileStore(str(tmp_path / "store"), 2)
    store.set("address", b"\xff\x00\x01")
    assert store.get("address") == other.get("address") == b"\xff\x00\x01"
    assert (store.add("number", 2), store.add("number", 3)) == (2, 5)
    assert store.check(["address"]) and not store.check(["address", "none"])
    assert store.compare_set("address", "no", "other") == b"\xff\x00\x01"
    threading.Timer(0.1, other.set, ("late", "here")).start()
    assert store.get("late") == b"here"


def test_a_wait_ends_in_time(tmp_path):
    with pytest.raises(PeerLost, match=r"'none' were not set within 0\.05 s"):
        build(tmp_path / "store", seconds=0.05).get("none")


def test_gloo_waits_no_longer_for_a_rank_that_will_not_come(tmp_path):
    inner = build(tmp_path / "store")
    store = PrefixStore("epoch-2", inner)
    news: list[str] = []
    threading.Timer(0.1, news.append, ("there is a newer view",)).start()
    started = time.monotonic()
    with interrupt_when(lambda: news[0] if news else None), pytest.raises(Exception, match="there is a newer view"):
        ProcessGroupGloo(store, 0, 2, timedelta(seconds=20))
    assert time.monotonic() - started < 10
