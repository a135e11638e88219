"""Frames: a whole message comes back, and every damage to one is found before its payload is touched."""

import random

import numpy as np
import pytest

from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import (
    BODY_BYTES,
    PROTOCOL_VERSION,
    Header,
    Place,
    is_chunk,
    pack,
    pack_chunk,
    unpack,
    unpack_chunk,
)


def header(num_bytes=None, *, dtype="uint8", shape=None, place=None) -> Header:
    if num_bytes is None and shape is None:
        dtype, shape = "", ()
    shape = (num_bytes,) if shape is None else shape
    return Header(
        PROTOCOL_VERSION, 0, "a", 5, "push", -1, "key", dtype=dtype, shape=shape, deadline=1.0, place=place, folder=""
    )


def views(frames) -> list[memoryview]:
    return [memoryview(bytes(frame)) for frame in frames]


def reason_of(frames) -> str:
    with pytest.raises(Dropped) as caught:
        unpack(views(frames))
    return caught.value.reason


def payload(num_bytes) -> memoryview:
    return memoryview(np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8))


@pytest.mark.parametrize("num_bytes", [None, 0, 1, 1000, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_message_comes_back_as_it_was(num_bytes):
    sent = None if num_bytes is None else payload(num_bytes)
    envelope = unpack(views(pack(header(num_bytes), b"body", sent)))
    assert envelope.header == header(num_bytes) and bytes(envelope.body) == b"body"
    assert envelope.num_bytes == (num_bytes or 0)
    assert envelope.is_stream == (num_bytes == CHUNK_BYTES + 1)
    if num_bytes and not envelope.is_stream:
        assert envelope.inline == sent
    else:
        assert envelope.inline is None


def test_a_payload_in_shared_memory_is_not_in_the_message():
    placed = header(100, place=Place("a-1.arena", 0, 100))
    envelope = unpack(views(pack(placed, b"", payload(100))))
    assert envelope.inline is None and not envelope.is_stream and envelope.num_bytes == 100


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frames"),
        ([b""], "frames"),
        ([b"", b"", b""], "frames"),
        ([b"", b"", b"12345678"], "frames"),
        ([b"x" * 40, b"", b"12345678"], "malformed"),
        ([*pack(header(), b"", None), b"12345678", b"12345678"], "frames"),
        ([*pack(header(), b"", None)[:2], b"x", b"12345678"], "payload"),
        ([*pack(header(4), b"", memoryview(b"1234"))[:2], b"12345678"], "payload"),
        ([*pack(header(4), b"", memoryview(b"1234"))[:2], b"123", b"12345678"], "payload"),
        ([*pack(header(0), b"", None)[:2], b"", b"12345678"], "payload"),
        ([*pack(header(shape=(2, 3), dtype="float64"), b"", None)[:2], b"x" * 47, b"12345678"], "payload"),
        ([*pack(header(shape=(2**40, 2**40)), b"", None)], "oversized"),
        ([pack(header(), b"", None)[0], b"x" * (BODY_BYTES + 1), b"12345678"], "oversized"),
        ([*pack(header(100, place=Place("a-1.arena", 0, 99)), b"", None)], "place"),
        ([*pack(header(100, place=Place("a-1.arena", 0, 100)), b"", None)[:2], b"x" * 100, b"12345678"], "payload"),
        ([*pack(header(), b"", None)[:2], b"12345678"], "corrupt"),
    ],
)
def test_frames_that_do_not_fit_together_are_refused(frames, reason):
    assert reason_of(frames) == reason


def test_every_flipped_bit_is_found():
    frames = pack(header(9), b"body", payload(9))
    for place, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            assert reason_of([*frames[:place], bytes(damaged), *frames[place + 1 :]])


def test_bytes_that_change_frames_are_found():
    frames = views(pack(header(), b"body", None))
    first, body, seal = (bytes(frame) for frame in frames)
    assert reason_of([first + body[:1], body[1:], seal])
    assert reason_of([first, body, b"", seal])


def test_a_chunk_comes_back_and_its_damage_is_found():
    data = payload(300)
    frames = views(pack_chunk(2**62, 17, data))
    chunk = unpack_chunk(frames)
    assert is_chunk(frames) and (chunk.sequence, chunk.index) == (2**62, 17) and chunk.data == data
    source = random.Random(0)
    for _ in range(500):
        place = source.randrange(2)
        damaged = bytearray(frames[place])
        damaged[source.randrange(1 - place, len(damaged))] ^= 1 << source.randrange(8)
        changed = [memoryview(damaged) if index == place else frame for index, frame in enumerate(frames)]
        with pytest.raises(Dropped) as caught:
            unpack_chunk(changed)
        assert caught.value.reason == "corrupt"
    for wrong in ([frames[0]], [*frames, frames[1]], [frames[0][:-1], frames[1]], [frames[0], frames[1][:0]]):
        with pytest.raises(Dropped) as caught:
            unpack_chunk(wrong)
        assert caught.value.reason == "frames"


def test_no_header_is_taken_for_a_chunk():
    assert not is_chunk(views(pack(header(), b"", None)))
    assert not is_chunk([]) and not is_chunk([memoryview(b"")])
