"""Statistics of blocks, merged, are those of all rows."""

import itertools
import math

import numpy as np
import pytest

from shoal.data.store.stats import describe_column, merge_stats, read_stats, stats_values
from shoal.data.table import Column, Field, number_column, text_column


def test_merged_statistics_are_those_of_the_whole():
    draw = np.random.default_rng(3)
    values = draw.normal(5.0, 2.0, size=(1000, 3)).astype("<f4")
    values[5, 1], values[6, 0] = np.nan, np.inf
    valid = draw.random(1000) > 0.2
    column = number_column("x", values, valid)
    cuts = [0, 1, 400, 401, 1000]
    parts = [describe_column(column.slice(start, stop)) for start, stop in itertools.pairwise(cuts)]
    merged, whole = merge_stats(parts), describe_column(column)
    there = values[valid].astype(np.float64)
    finite = there[np.isfinite(there)]
    assert merged.rows == 1000 and merged.missing == int((~valid).sum()) and merged.elements == there.size
    assert (
        (merged.finite, merged.min, merged.max)
        == (finite.size, finite.min(), finite.max())
        == (
            whole.finite,
            whole.min,
            whole.max,
        )
    )
    assert merged.mean == pytest.approx(finite.mean(), rel=1e-13) and merged.variance == pytest.approx(
        finite.var(), rel=1e-12
    )
    assert math.isclose(merged.sum, finite.sum(), rel_tol=1e-12)


def test_whole_numbers_keep_all_their_digits():
    found = describe_column(number_column("k", np.array([2**62 + 1, -(2**62) - 1])))
    assert (found.min, found.max) == (-(2**62) - 1, 2**62 + 1)
    assert read_stats(stats_values(found)) == found


def test_text_and_lists():
    assert describe_column(text_column("t", ["ab", None, "cde"])).elements == 5
    column = Column(
        field=Field(name="l", kind="list:<i4"),
        values=np.array([4, 9, 2], dtype="<i4"),
        offsets=np.array([0, 2, 2, 3]),
        valid=np.array([True, True, False]),
    )
    found = describe_column(column)
    assert (found.missing, found.elements, found.min, found.max) == (1, 2, 4, 9)


@pytest.mark.parametrize(
    "values",
    [[], {}, {"rows": -1}, {"rows": "1"}, {"rows": True}, {"rows": 1, "mean": "x"}, {"rows": 1, "other": 2}],
    ids=str,
)
def test_nonsense_is_refused(values):
    with pytest.raises(ValueError):
        read_stats(values)
