"""A slow reader is the one that is slower than the others by a factor, and by a time that matters."""

import pytest

from shoal.data.loading.slowness import SlowReader, find_slow_reader


@pytest.mark.parametrize(
    ("seconds", "steps", "rank"),
    [
        ([1.0, 1.1, 5.0, 0.9], 10, 2),
        ([5.0, 0.1], 10, 0),
        ([1.0, 1.1, 2.9, 0.9], 10, None),
        ([0.001, 0.04], 10, None),
        ([5.0], 10, None),
        ([5.0, 1.0], 0, None),
        ([5.0, 5.0, 0.1], 10, None),
    ],
)
def test_who_is_named(seconds, steps, rank):
    found = find_slow_reader(seconds, steps)
    assert (None if found is None else found.rank) == rank
    if found is not None:
        others = sorted(one for place, one in enumerate(seconds) if place != rank)
        assert found == SlowReader(rank=rank, seconds=seconds[rank], usual=others[len(others) // 2])
