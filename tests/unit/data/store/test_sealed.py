"""A flipped bit or a cut anywhere in a manifest is seen before it is parsed."""

import pytest

from shoal.data.store.errors import BrokenFile
from shoal.data.store.sealed import seal, unseal

VALUES = {"version": 3, "names": ["a", "b"], "deep": {"x": None, "y": 1.5}}


def test_values_come_back_and_have_one_text():
    data = seal(VALUES)
    values, digest = unseal(data, file="m")
    assert values == VALUES and digest.encode() in data and seal(VALUES) == data


def test_every_flipped_bit_is_found():
    data = seal(VALUES)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BrokenFile, match="m: "):
            unseal(bytes(flipped), file="m")


def test_every_cut_is_found():
    data = seal(VALUES)
    for length in range(len(data)):
        with pytest.raises(BrokenFile):
            unseal(data[:length], file="m")


def test_what_is_sealed_and_no_json_is_refused():
    for text in ("[" * 100_000, '{"a": 1' + "1" * 10_000 + "}"):
        forged = seal({"x": 0}).replace(b'"x": 0', text.encode())
        with pytest.raises(BrokenFile):
            unseal(forged, file="m")
