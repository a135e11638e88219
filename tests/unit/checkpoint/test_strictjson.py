"""JSON from files that may be hostile."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.strictjson import MAX_MARKS, parse

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(TREES)
def test_plain_json_is_read(tree):
    assert parse(json.dumps(tree).encode()) == tree


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 1}', "'a' stands twice"),
        (b'[{"x": {"b": 1, "c": 2, "b": 3}}]', "'b' stands twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[" * 100_000 + b"]" * 100_000, "nests too deeply"),
        (b"[" + b"0," * (MAX_MARKS + 1) + b"0]", "values, more than"),
        (b"\xff", "utf-8"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"9" * 5000, "integer string conversion"),
    ],
    ids=["twice", "twice inside", "nan", "infinity", "deep", "crowded", "bytes", "nothing", "more", "long number"],
)
def test_the_rest_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse(text)
