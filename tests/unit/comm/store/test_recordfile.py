"""Keys in a file that several processes write to, any of which may be killed: what is half written holds nobody up."""

import multiprocessing
import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import interrupt_when
from shoal.comm.store.recordfile import RecordFileStore


def build(path, seconds=20.0):
    store = RecordFileStore(str(path))
    store.set_timeout(timedelta(seconds=seconds))
    return store


def test_every_store_sees_the_keys_of_the_others(tmp_path):
    store, other = build(tmp_path / "store"), build(tmp_path / "store")
    store.set("address", b"\xff\x00\x01")
    assert store.get("address") == other.get("address") == b"\xff\x00\x01"
    assert (store.add("number", 2), other.add("number", 3)) == (2, 5)
    assert store.check(["address"]) and not store.check(["address", "none"])
    assert other.compare_set("address", "no", "other") == b"\xff\x00\x01"
    assert other.compare_set("address", b"\xff\x00\x01", "other") == b"other" == store.get("address")
    assert store.compare_set("new", "", "first") == b"first" and other.compare_set("newer", "x", "y") == b"x"
    assert other.delete_key("new") and not store.delete_key("new") and not store.check(["new"])
    assert store.num_keys() == other.num_keys() == 2
    assert store.clone().get("number") == b"5"
    threading.Timer(0.05, other.set, ("late", "")).start()
    assert store.get("late") == b""


@pytest.mark.parametrize("left", range(1, 20))
def test_a_record_of_which_a_part_was_written_is_nobodys(tmp_path, left):
    path = tmp_path / "store"
    build(path).set("before", "1")
    whole = path.read_bytes()
    build(path).set("killed", "22")
    path.write_bytes(path.read_bytes()[: len(whole) + left])
    reader, writer = build(path), build(path)
    assert reader.check(["before"]) and not reader.check(["killed"])
    writer.set("after", "3")
    assert reader.get("after") == b"3" and build(path).num_keys() == 2


def test_who_holds_the_lock_and_stands_still_holds_up_nobody_for_ever(tmp_path):
    holder, store = build(tmp_path / "store"), build(tmp_path / "store", seconds=0.05)
    with holder._locked():
        with pytest.raises(PeerLost, match=r"the ranks' store was not free within 0\.05 s"):
            store.set("key", "1")
        with interrupt_when(lambda: "there is a newer view"), pytest.raises(PeerLost, match="there is a newer view"):
            build(tmp_path / "store").add("key", 1)
    store.set("key", "1")
    assert holder.get("key") == b"1"


def test_a_wait_ends_in_time_and_when_there_is_a_reason(tmp_path):
    with pytest.raises(PeerLost, match=r"'none' were not set within 0\.05 s"):
        build(tmp_path / "store", seconds=0.05).get("none")
    with interrupt_when(lambda: "there is a newer view"), pytest.raises(PeerLost, match="there is a newer view"):
        build(tmp_path / "store").get("none")


def _add(path, number):
    store = PrefixStore("epoch-1", inner := build(path))
    for _ in range(number):
        store.add("sum", 1)
    inner.check([])


def test_nothing_is_lost_between_processes(tmp_path):
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_add, args=(tmp_path / "store", 200)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert build(tmp_path / "store").get("epoch-1/sum") == b"600"
