"""Rows of arrays as samples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import RunError
from shoal.data.sources.arrays import ArraySource, WindowSource


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


torch.set_num_threads(1)


def test_a_sample_is_its_window_and_the_tokens_after() -> None:
    source = WindowSource(np.arange(23, dtype=np.uint8), 5, vocab=256)
    assert len(source) == 4
    items = source.collate([3, 0])
    assert items.inputs[0].tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert items.targets.tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]
    assert items.inputs[0].dtype == items.targets.dtype == torch.int64
    assert items.weight == 10 == 2 * source.uniform_weight


@pytest.mark.parametrize(("num_tokens", "samples"), [(0, 0), (1, 0), (5, 0), (6, 1), (10, 1), (11, 2)])
def test_a_sample_needs_one_token_more_than_it_has(num_tokens: int, samples: int) -> None:
    assert len(WindowSource(np.zeros(num_tokens, dtype=np.uint8), 5, vocab=256)) == samples


def test_a_memory_map_is_read_and_not_written(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "ids")
    source = WindowSource(np.asarray(np.memmap(tmp_path / "ids", dtype=np.uint16, mode="r")), 9, vocab=1000)
    items = source.collate(np.array([100]))
    assert items.inputs[0].tolist() == [list(range(900, 909))]
    items.inputs[0].zero_()
    assert source.collate([100]).inputs[0][0, 0] == 900


@pytest.mark.parametrize("wrong", [70, -1])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    tokens = np.zeros(40, dtype=np.int32)
    tokens[25] = wrong
    source = WindowSource(tokens, 8, vocab=64)
    source.collate([0, 1])
    with pytest.raises(RunError, match=f"sample 3 of the token file .*{wrong}.* vocabulary is 64"):
        source.collate([0, 3])
