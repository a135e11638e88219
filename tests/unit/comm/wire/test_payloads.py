"""Payloads in chunks: whole and in order, or nothing."""

import os
import signal

import numpy as np
import pytest

from shoal.comm.wire import buffers
from shoal.comm.wire import payloads as streams
from shoal.comm.wire.buffers import CHUNK_BYTES, copy, see
from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import Chunk
from shoal.comm.wire.payloads import MAX_STREAMS, MAX_STREAMS_EACH, Streams
from support.wire.operations import noise

DATA = bytes(range(256)) * 8192 + b"tail"
NUM_BYTES = len(DATA)


class Ends:
    def __init__(self, table: Streams, source="r", sequence=1, num_bytes=NUM_BYTES):
        self.table = table
        self.target = memoryview(bytearray(num_bytes))
        self.seen: list[str] = []
        table.open(
            source,
            sequence,
            self.target,
            finish=lambda: self.seen.append("whole"),
            fail=lambda why: self.seen.append(why),
        )

    def feed(self, index, *, source="r", sequence=1, data=None):
        part = DATA[index * CHUNK_BYTES :][:CHUNK_BYTES] if data is None else data
        self.table.feed(source, Chunk(sequence=sequence, index=index, data=memoryview(part)))


def reason_of(work) -> str:
    with pytest.raises(Dropped) as caught:
        work()
    return caught.value.reason


def test_chunks_in_order_make_a_payload():
    table = Streams()
    first, second = Ends(table), Ends(table, sequence=2)
    for index in range(3):
        assert first.seen == []
        first.feed(index)
        second.feed(index, sequence=2)
    assert first.seen == second.seen == ["whole"] and bytes(first.target) == bytes(second.target) == DATA
    assert len(table) == 0 and reason_of(lambda: first.feed(0)) == "unknown"


@pytest.mark.parametrize(
    "wrong",
    [{"index": 0}, {"index": 2}, {"index": 1, "data": b"short"}, {"index": 1, "data": b"x" * (CHUNK_BYTES + 1)}],
)
def test_a_chunk_that_is_not_the_next_ends_the_payload(wrong):
    table = Streams()
    ends = Ends(table)
    ends.feed(0)
    assert reason_of(lambda: ends.feed(**wrong)) == "payload"
    assert ends.seen == ["incomplete"] and len(table) == 0


def test_a_chunk_belongs_to_its_sender():
    table = Streams()
    ends = Ends(table)
    assert reason_of(lambda: ends.feed(0, source="other")) == "unknown"
    assert reason_of(lambda: ends.feed(0, sequence=9)) == "unknown"
    assert ends.seen == [] and len(table) == 1


def test_closed_and_silent_ones_fail_once(monkeypatch):
    table = Streams()
    ends = [Ends(table, sequence=number) for number in range(3)]
    table.close("r", 0)
    table.close("r", 0)
    table.expire()
    assert [end.seen for end in ends] == [["incomplete"], [], []]
    monkeypatch.setattr(streams, "IDLE_SECONDS", -1.0)
    table.expire()
    assert [end.seen for end in ends] == [["incomplete"]] * 3 and len(table) == 0


def test_their_number_is_bounded():
    table = Streams()
    for number in range(MAX_STREAMS_EACH):
        table.check_room("r")
        Ends(table, sequence=number, num_bytes=5)
    assert reason_of(lambda: table.check_room("r")) == "busy"
    table.check_room("other")
    for number in range(MAX_STREAMS - MAX_STREAMS_EACH):
        Ends(table, source=number, num_bytes=5)
    assert reason_of(lambda: table.check_room("other")) == "busy"
    table.close_all()
    table.check_room("r")


SIZES = [0, 1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3]


@pytest.mark.parametrize("has_cores", [True, False])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_byte_is_copied_and_none_beside(num_bytes, has_cores, monkeypatch):
    monkeypatch.setattr(buffers, "_HAS_CORES", has_cores)
    source, target = noise(num_bytes), np.full(num_bytes + 2, 7, np.uint8)
    copy(see(source), see(target[1:-1]))
    assert np.array_equal(target[1:-1], source) and target[0] == target[-1] == 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12 and later
def test_a_fork_has_a_thread_of_its_own():
    """Its parent's is not there, and whoever waited for it would wait for ever."""
    source, target = noise(8 << 20), np.zeros(8 << 20, np.uint8)
    copy(see(source), see(target))
    child = os.fork()
    if not child:
        signal.alarm(20)
        target[:] = 0
        for _ in range(20):
            copy(see(source), see(target))
        os._exit(0 if np.array_equal(source, target) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
