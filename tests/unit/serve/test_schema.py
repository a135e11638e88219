import json

import numpy as np
import pytest

from shoal.checkpoint.published.version import InputField
from shoal.serve.schema import BadRequest, read_rows

FIELDS = (
    InputField(name="x", dtype="float32", shape=(2, 2)),
    InputField(name="kind", dtype="int64", shape=(), below=5),
)
TOKENS = (InputField(name="ids", dtype="int64", shape=(8,), below=10, is_sequence=True),)
ROW = {"x": [[1, 2.5], [3, 4]], "kind": 4}


def body(tree):
    return json.dumps(tree).encode()


def test_rows_and_columns_are_the_same_samples():
    by_rows = read_rows(body({"rows": [ROW, {"x": [[0, 0], [0, 1]], "kind": 0}]}), FIELDS, most=4)
    columns = {"x": [ROW["x"], [[0, 0], [0, 1]]], "kind": [4, 0]}
    by_columns = read_rows(body({"inputs": columns}), FIELDS, most=4)
    for one, other in zip(by_rows, by_columns, strict=True):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    assert by_rows[0][0].dtype == np.float32 and by_rows[0][0].shape == (2, 2) and by_rows[0][1].shape == ()


def test_a_sequence_may_be_shorter():
    (row,) = read_rows(body({"rows": [{"ids": [1, 2, 9]}]}), TOKENS, most=4)
    assert row[0].tolist() == [1, 2, 9]
    for ids in ([], [1] * 9, [10], [-1], [1.0], [True], ["1"], [[1]], 1):
        with pytest.raises(BadRequest, match=r"rows\[0\].ids"):
            read_rows(body({"rows": [{"ids": ids}]}), TOKENS, most=4)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"x": [[1, 2], [3]]}, r"rows\[0\].x\[1\] is a list of 1"),
        ({"x": [[1, 2]]}, r"rows\[0\].x is a list of 1"),
        ({"x": "1"}, "a text"),
        ({"x": [[1, None], [3, 4]]}, r"rows\[0\].x\[0\]\[1\] is null"),
        ({"x": [[1, True], [3, 4]]}, "true or false"),
        ({"x": [[1, 1e39], [3, 4]]}, "beyond what float32 holds"),
        ({"x": [[1, 10**400], [3, 4]]}, "a very large number"),
        ({"kind": 5}, "from 0 to 4"),
        ({"kind": 1.5}, "not a whole number"),
        ({"more": 1}, "the model takes x, kind"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_place(change, where):
    with pytest.raises(BadRequest, match=where):
        read_rows(body({"rows": [{**ROW, **change}]}), FIELDS, most=4)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"{}", b'{"rows": []}', b'{"rows": {}}', b'{"rows": [1]}', b'{"rows": [[1]]}', b"\xff\xfe",
        b'{"rows": [], "rows": []}', b'{"inputs": {"x": [], "kind": []}}', b'{"inputs": {"x": [[[1,2],[3,4]]], "kind": [1, 2]}}',
        b'{"rows": [{"x": [[NaN, 1], [1, 1]], "kind": 1}]}', b'{"rows": [{"x": [[1e999, 1], [1, 1]], "kind": 1}]}',
        b"[" * 100_000, b'{"a":' * 50_000, b'{"rows": [' + b"{}," * 5 + b"{}]}", b'{"rows": [' + b"9" * 5000 + b"]}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(text):
    with pytest.raises(BadRequest):
        read_rows(text, FIELDS, most=4)
