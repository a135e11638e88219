"""Moments do not depend on how many shards there are, and equal those of one process."""

import numpy as np
import pytest

from shoal.data.transform import moments
from shoal.data.transform.moments import BLOCK, comoments_of, map_blocks, merge_tree, moments_of

ROWS = 3 * BLOCK + 1234


@pytest.fixture(scope="module")
def values():
    draws = np.random.default_rng(0)
    return draws.normal(size=(ROWS, 4)) * 10.0 ** draws.integers(-3, 4, size=4) + 1e3


def bits(found):
    return [array.tobytes() for array in (found.count, found.mean, found.m2, found.least, found.most)]


def test_any_number_of_shards_gives_the_same_bits(values):
    valid = np.random.default_rng(1).random(values.shape) > 0.1
    one = bits(moments_of(values, valid))
    pairs = comoments_of(values)
    for shards in range(2, 9):
        assert bits(moments_of(values, valid, shards)) == one
        found = comoments_of(values, shards)
        assert found.c2.tobytes() == pairs.c2.tobytes() and found.mean.tobytes() == pairs.mean.tobytes()


def test_blocks_of_shards_are_merged_in_the_order_of_blocks(values):
    """Merged in the order of shards they would give other bits: what makes the test above one that can fail."""
    valid = np.ones(values.shape, np.bool_)
    whole = moments_of(values, valid)
    blocks = map_blocks(lambda rows: moments._block(values[rows], valid[rows]), ROWS)
    by_shard = merge_tree(
        [blocks[number] for shard in range(3) for number in range(shard, len(blocks), 3)], moments.merge_moments
    )
    assert bits(by_shard) != bits(whole)
    assert by_shard.m2 == pytest.approx(whole.m2, rel=1e-12)


@pytest.mark.parametrize("only", ["all", "mean", "range"])
def test_without_a_mask_the_bits_are_those_of_a_whole_one(values, only):
    whole = bits(moments_of(values, np.ones(values.shape, np.bool_), only=only))
    assert bits(moments_of(values, None, only=only)) == whole
    assert bits(moments_of(values, None, 3, only=only)) == whole


def test_moments_are_those_of_numpy(values):
    valid = np.random.default_rng(2).random(values.shape) > 0.3
    found = moments_of(values, valid, 3)
    for column in range(4):
        there = values[valid[:, column], column]
        assert (
            found.count[column] == len(there)
            and found.least[column] == there.min()
            and found.most[column] == there.max()
        )
        assert found.mean[column] == pytest.approx(there.mean(), rel=1e-14)
        assert found.variance[column] == pytest.approx(there.var(), rel=1e-12)
    pairs = comoments_of(values)
    assert pairs.c2 / ROWS == pytest.approx(np.cov(values.T, bias=True), rel=1e-10)
