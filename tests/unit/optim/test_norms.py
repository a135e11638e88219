"""Row sums and whole norms: right, and the same bits however rows are divided over ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import norms as rows_module
from shoal.optim.norms import square_sums, whole_norms


def test_sums_are_the_float64_sums_of_squares():
    tensor = torch.tensor([[1.0, 2.0, 2.0], [3.0, 4.0, 0.0]])
    assert square_sums(tensor).tolist() == [9.0, 25.0]
    assert square_sums(tensor).dtype == torch.float64
    assert square_sums(torch.tensor(3.0)).tolist() == [9.0]
    assert square_sums(torch.tensor([3.0, 4.0])).tolist() == [9.0, 16.0]
    assert square_sums(torch.zeros(0, 3)).tolist() == []
    assert square_sums(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_squares_beyond_float32_are_kept():
    norms = whole_norms([torch.full((2, 2), 1e30), torch.full((3,), 1e-30)])
    assert norms.tolist() == pytest.approx([2e30, math.sqrt(3) * 1e-30], rel=1e-6)


def test_a_float64_tensor_is_not_changed():
    tensor = torch.full((2, 3), 3.0, dtype=torch.float64)
    square_sums(tensor)
    assert tensor.unique().tolist() == [3.0]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(7, 70001), (2, 40000), (1, 70001), (40, 3, 5), (9, 1), (5, 4097)])
def test_a_row_has_the_same_sum_alone_and_among_others(threads, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = square_sums(tensor)
    for cut in range(shape[0] + 1):
        parts = torch.cat((square_sums(tensor[:cut]), square_sums(tensor[cut:])))
        assert torch.equal(whole, parts), (threads, cut)


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 12), num_columns=st.integers(1, 300), cut=st.integers(0, 12), seed=st.integers(0, 99))
def test_any_cut_gives_the_same_sums(num_rows, num_columns, cut, seed):
    tensor = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(square_sums(tensor), torch.cat((square_sums(tensor[:cut]), square_sums(tensor[cut:]))))


def test_blocks_do_not_change_a_bit(monkeypatch):
    tensor = torch.randn(23, 31, generator=torch.Generator().manual_seed(2))
    whole = square_sums(tensor)
    for size in (1, 31, 70, 200):
        monkeypatch.setattr(rows_module, "_BLOCK_ELEMENTS", size)
        assert torch.equal(square_sums(tensor), whole)
