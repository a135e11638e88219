"""Shares of the data, by position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.data.shares import split_positions


@given(total=st.integers(3, 10_000), validation=st.floats(0, 0.45), test=st.floats(0, 0.45))
def test_the_splits_are_everything_once(total: int, validation: float, test: float) -> None:
    train, held_out, final = split_positions(total, validation, test)
    assert [*train, *held_out, *final] == list(range(total))
    assert bool(held_out) == (validation > 0)
    assert bool(final) == (test > 0)
    assert abs(len(held_out) - total * validation) <= 1


def test_a_small_share_is_rounded_up_to_what_is_needed() -> None:
    assert [len(part) for part in split_positions(1000, 0.01, 0.0, needed=33)] == [967, 33, 0]


def test_too_little_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match="has 98 bytes and one sequence of 32 needs 33: 3 splits need at least 99"):
        split_positions(98, 0.05, 0.05, needed=33, what="bytes")
    assert len(split_positions(99, 0.05, 0.05, needed=33, what="bytes")[0]) == 33
    with pytest.raises(RequestError, match="has 2 samples and each split needs 1: 3 splits need at least 3"):
        split_positions(2, 0.1, 0.1)
