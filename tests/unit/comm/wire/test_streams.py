"""Payloads in chunks: whole and in order, or nothing."""

import pytest

from shoal.comm.wire import streams
from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.message import Chunk
from shoal.comm.wire.streams import MAX_STREAMS, MAX_STREAMS_EACH, Streams
from shoal.comm.wire.verdict import Dropped

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
