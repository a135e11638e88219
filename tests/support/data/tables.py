"""Tables with every kind of column, and whether two tables are the same."""

import numpy as np

from shoal.data.table import Column, Field, Table, number_column, text_column


def make_table(num_rows, *, first=0, seed=0):
    """Rows with a key, numbers of a shape with gaps, text with gaps, lists, truth values and times."""
    draw = np.random.default_rng([seed, first])
    ids = np.arange(first, first + num_rows, dtype=np.int64)
    lengths = draw.integers(0, 5, size=num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = draw.integers(-9, 9, size=offsets[-1]).astype("<i4")
    return Table.of(
        [
            number_column("id", ids * 3),
            number_column("x", draw.normal(size=(num_rows, 4)).astype("<f4"), draw.random(num_rows) > 0.1),
            text_column("name", [None if i % 7 == 3 else f"row {i} " * (i % 4) for i in ids.tolist()]),
            Column(field=Field(name="list", kind="list:<i4"), values=flat, offsets=offsets),
            number_column("flag", draw.random(num_rows) > 0.5),
            number_column("when", ids.astype("<M8[us]")),
        ]
    )


def assert_same(found, expected):
    """Fail where two tables differ in a column, a value or a gap."""
    assert found.schema == expected.schema and len(found) == len(expected)
    for own, other in zip(found.columns, expected.columns, strict=True):
        everything = np.ones(len(found), dtype=np.bool_)
        here = everything if own.valid is None else own.valid
        there = everything if other.valid is None else other.valid
        assert np.array_equal(here, there), own.field.name
        assert np.array_equal(own.values, other.values), own.field.name
        assert own.offsets is None or np.array_equal(own.offsets, other.offsets), own.field.name
