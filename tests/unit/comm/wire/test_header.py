"""The header: what is refused before anything else of a message is looked at."""

import math

import msgspec
import pytest

from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import (
    DEADLINE_SECONDS,
    HEADER_BYTES,
    ITEM_BYTES,
    PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Header,
    Place,
    decode_header,
    encode_header,
    payload_bytes,
)

WHOLE = Header(
    version=PROTOCOL_VERSION,
    epoch=3,
    sender="0123456789abcdef",
    sequence=7,
    operation="push",
    answers=-1,
    key="shard/0",
    dtype="float32",
    shape=(4, 5),
    deadline=2.5,
    place=None,
    folder="",
)


def reason_of(work) -> str:
    with pytest.raises(Dropped) as caught:
        work()
    return caught.value.reason


def altered(**fields) -> bytes:
    """The header with fields of any type."""
    values = {name: getattr(WHOLE, name) for name in WHOLE.__struct_fields__} | fields
    return msgspec.msgpack.encode(list(values.values()))


def test_a_header_comes_back_as_it_was():
    for header in (WHOLE, msgspec.structs.replace(WHOLE, place=Place("a-1.arena", 64, 80), dtype="float32")):
        assert decode_header(encode_header(header)) == header
    assert decode_header(altered()) == WHOLE


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": PROTOCOL_VERSION + 1}, "version"),
        ({"version": 256}, "malformed"),
        ({"version": -1}, "malformed"),
        ({"version": "1"}, "malformed"),
        ({"epoch": -1}, "malformed"),
        ({"epoch": 2**63}, "malformed"),
        ({"epoch": 1.5}, "malformed"),
        ({"epoch": True}, "malformed"),
        ({"sender": ""}, "malformed"),
        ({"sender": "../etc"}, "malformed"),
        ({"sender": "a" * 65}, "malformed"),
        ({"sender": "a\n"}, "malformed"),
        ({"sender": 5}, "malformed"),
        ({"sequence": -1}, "malformed"),
        ({"sequence": None}, "malformed"),
        ({"operation": "x" * 65}, "malformed"),
        ({"operation": b"push"}, "malformed"),
        ({"answers": -2}, "malformed"),
        ({"key": "k" * 257}, "malformed"),
        ({"dtype": "float128"}, "payload"),
        ({"dtype": "object"}, "payload"),
        ({"dtype": ">f4"}, "payload"),
        ({"dtype": ""}, "payload"),
        ({"shape": (1,) * 9}, "malformed"),
        ({"shape": (-1,)}, "malformed"),
        ({"shape": (2**40 + 1,)}, "malformed"),
        ({"shape": (1.0,)}, "malformed"),
        ({"shape": 20}, "malformed"),
        ({"deadline": -0.1}, "malformed"),
        ({"deadline": math.nan}, "malformed"),
        ({"deadline": math.inf}, "malformed"),
        ({"deadline": DEADLINE_SECONDS * 2}, "malformed"),
        ({"deadline": "1"}, "malformed"),
        ({"place": ["a", 0]}, "malformed"),
        ({"place": ["a", -1, 80]}, "malformed"),
        ({"place": ["a" * 129, 0, 80]}, "malformed"),
        ({"place": ["a", 0, 80, 1]}, "malformed"),
        ({"dtype": "", "shape": (), "place": ["a-1.arena", 0, 0]}, "payload"),
        ({"folder": "f" * 65}, "malformed"),
        ({"more": 1}, "malformed"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(fields, reason):
    assert reason_of(lambda: decode_header(altered(**fields))) == reason


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x90", b"{}", b"\xff" * 40, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_what_is_no_header_is_refused(frame):
    assert reason_of(lambda: decode_header(frame)) in ("malformed", "frames")


def test_every_cut_and_every_tail_of_a_header_is_refused():
    whole = encode_header(WHOLE)
    for length in range(len(whole)):
        assert reason_of(lambda cut=whole[:length]: decode_header(cut)) in ("malformed", "frames")
    assert reason_of(lambda: decode_header(whole + b"\0")) == "malformed"
    assert reason_of(lambda: decode_header(whole + b"\0" * HEADER_BYTES)) == "frames"


def test_a_bad_name_is_no_text():
    whole = encode_header(WHOLE)
    assert reason_of(lambda: decode_header(whole.replace(b"shard/0", b"shard/\xff"))) == "malformed"


def test_only_a_whole_header_names_somebody_to_tell():
    with pytest.raises(Dropped) as caught:
        decode_header(altered(version=PROTOCOL_VERSION + 1))
    assert caught.value.header is not None and str(PROTOCOL_VERSION + 1) in caught.value.text
    with pytest.raises(Dropped) as caught:
        decode_header(altered(epoch=-1))
    assert caught.value.header is None


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_bytes_are_those_of_dtype_and_shape(dtype):
    assert payload_bytes(msgspec.structs.replace(WHOLE, dtype=dtype)) == 20 * ITEM_BYTES[dtype]
    assert payload_bytes(msgspec.structs.replace(WHOLE, dtype=dtype, shape=(2**40, 0))) == 0
    assert payload_bytes(msgspec.structs.replace(WHOLE, dtype=dtype, shape=())) == ITEM_BYTES[dtype]


@pytest.mark.parametrize("shape", [(2**40,), (2**40,) * 8, (2**32, 2**32), (PAYLOAD_BYTES // 4 + 1,)])
def test_a_length_bomb_is_refused(shape):
    """A product in 64 bits would have come out as 0 or small for some of these."""
    assert reason_of(lambda: payload_bytes(msgspec.structs.replace(WHOLE, shape=shape))) == "oversized"
