"""Moments of parts put together, against moments of the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.parallel.batchnorm import add_in_order, combine_moments, local_moments


def numpy_moments(x: np.ndarray) -> np.ndarray:
    flat = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    mean = flat.mean(axis=1)
    return np.concatenate(([flat.shape[1]], mean, ((flat - mean[:, None]) ** 2).sum(axis=1)))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0),
    spatial=st.sampled_from([(), (3,), (2, 3)]),
    offset=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_parts_give_the_moments_of_the_whole(sizes, spatial, offset, seed):
    x = np.random.default_rng(seed).normal(size=(sum(sizes), 3, *spatial)) + offset
    edges = np.cumsum([0, *sizes])
    parts = [torch.from_numpy(x[a:b]) for a, b in pairwise(edges)]
    combined = combine_moments([local_moments(part) for part in parts])
    # The spread of values around 1e4 keeps 16 - 2 * 4 digits of float64 in either formula.
    np.testing.assert_allclose(combined.numpy(), numpy_moments(x), rtol=1e-12 if offset == 0 else 1e-6, atol=1e-12)


def test_nothing_has_count_zero():
    empty = local_moments(torch.zeros(0, 3, 4))
    assert empty.tolist() == [0.0] * 7
    assert combine_moments([empty, empty]).tolist() == [0.0] * 7


def test_an_empty_part_changes_no_bit():
    part = local_moments(torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    empty = torch.zeros_like(part)
    alone = combine_moments([part])
    assert torch.equal(combine_moments([empty, part]), alone)
    assert torch.equal(combine_moments([part, empty, empty]), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_types_are_summed_in_a_longer_one(dtype):
    x = torch.full((4096, 1), 3.0, dtype=dtype)
    assert local_moments(x).tolist() == [4096.0, 3.0, 0.0]


def test_sums_go_from_first_to_last():
    values = [torch.tensor(value, dtype=torch.float64) for value in (1e16, 1.0, 1.0, -1e16)]
    assert add_in_order(values).item() == ((1e16 + 1.0) + 1.0) - 1e16
    assert values[0].item() == 1e16
