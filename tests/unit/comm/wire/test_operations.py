"""The table of operations: strict types, by name and by type."""

import msgspec
import pytest

from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.operations import Body, Op, Operations


class Push(Body, frozen=True):
    number: int
    name: str


class Pushed(Body, frozen=True):
    version: int


class Beat(Body, frozen=True):
    pass


TABLE = Operations({"push": Op(Push, Pushed)})


def test_bodies_cross_as_their_own_types():
    body = Push(3, "a")
    assert TABLE.name_of(body) == "push"
    assert TABLE.decode_request("push", TABLE.encode(body)) == body
    assert TABLE.decode_answer("push", TABLE.encode(Pushed(1))) == Pushed(1)


@pytest.mark.parametrize(
    "value", [[3], [3, "a", 1], ["3", "a"], [3, 4], [3.5, "a"], [None, "a"], {"number": 3, "name": "a"}, 3]
)
def test_another_body_is_refused(value):
    with pytest.raises(Dropped) as caught:
        TABLE.decode_request("push", msgspec.msgpack.encode(value))
    assert caught.value.reason == "malformed" and "push" in caught.value.text


@pytest.mark.parametrize(
    "frame", [b"", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffa", b"\xc1", b"\x92\x03\xa1\xff"]
)
def test_bytes_that_are_no_body_are_refused(frame):
    with pytest.raises(Dropped):
        TABLE.decode_request("push", frame)


def test_tables_of_two_rooms_become_one():
    both = TABLE | Operations({"beat": Op(Beat, Beat)})
    assert set(both) == {"push", "beat"} and both.name_of(Beat()) == "beat" and "push" in both
    with pytest.raises(AssertionError):
        TABLE | TABLE
    with pytest.raises(AssertionError):
        Operations({"a": Op(Push, Pushed), "b": Op(Push, Pushed)})
    with pytest.raises(AssertionError):
        TABLE.name_of(Beat())
