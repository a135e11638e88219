"""Rows of arrays as samples."""

import numpy as np
import torch

from shoal.data.arrays import ArraySource


def test_a_split_is_its_rows() -> None:
    inputs, targets = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)
    source = ArraySource((inputs,), targets, rows=range(4, 9), uniform_weight=1)
    assert len(source) == 5
    items = source.collate([2, 0])
    assert items.targets.tolist() == [6, 4]
    assert torch.equal(items.inputs[0], torch.tensor([[12.0, 13.0], [8.0, 9.0]]))
    assert items.weight == 2


def test_a_varying_weight_is_counted() -> None:
    targets = np.array([[1, -100], [2, 3], [-100, -100]])
    source = ArraySource((targets, targets), targets, rows=range(3), uniform_weight=None)
    assert source.uniform_weight is None
    assert [source.collate([i]).weight for i in range(3)] == [1, 2, 0]
    assert source.collate([0, 1, 2]).weight == 3
    assert len(source.collate([0]).inputs) == 2


def test_a_batch_is_a_copy() -> None:
    array = np.ones((3, 2), dtype=np.float32)
    ArraySource((array,), array, rows=range(3), uniform_weight=1).collate([0]).inputs[0].zero_()
    assert array.all()
