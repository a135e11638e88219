"""Quantiles are exact, for any number of shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.transform import quantiles
from shoal.data.transform.quantiles import quantiles_of

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.999, 1.0)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=60), st.integers(1, 8))
def test_as_numpy_has_them(numbers, shards):
    values = np.array(numbers, dtype=np.float64)
    parts = np.array_split(values, shards)
    assert quantiles_of(parts, SHARES) == pytest.approx(np.quantile(values, SHARES).tolist(), rel=1e-12, abs=1e-300)


def test_digit_by_digit_where_many_are_in_question(monkeypatch):
    monkeypatch.setattr(quantiles, "_FEW", 3)
    values = np.random.default_rng(0).normal(size=5000).round(3)
    assert quantiles_of(np.array_split(values, 3), (0.25, 0.5)) == np.quantile(values, (0.25, 0.5)).tolist()
