"""The words that a difference is described in: each pattern planted in plain tensors, and found by name."""

import pytest
import torch

from shoal.core.placement import place_whole
from shoal.verify.compare.assemble import RankPiece
from shoal.verify.compare.diagnose import (
    RankGrid,
    describe_number,
    describe_rows,
    describe_spread,
    describe_tensor,
    find_factor,
    name_factor,
)

DP_TP = RankGrid(
    degrees={"pp": 1, "dp": 2, "cp": 1, "tp": 2, "microbatches": 4},
    coordinates=[{"pp": 0, "dp": dp, "cp": 0, "tp": tp} for dp in range(2) for tp in range(2)],
)
DP3_CP2 = RankGrid(
    degrees={"pp": 1, "dp": 3, "cp": 2, "tp": 1, "microbatches": 1},
    coordinates=[{"pp": 0, "dp": dp, "cp": cp, "tp": 0} for dp in range(3) for cp in range(2)],
)


@pytest.fixture
def reference():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def rows_of(reference, locals_by_rank):
    """Every rank with the rows of its tp coordinate, as column parallelism cuts a weight."""
    whole = place_whole(reference.shape)
    return [
        RankPiece(rank=rank, local=local, placement=whole.rows(4 * (rank % 2), 4 * (rank % 2) + 4))
        for rank, local in locals_by_rank
    ]


def copies_of(reference, values):
    return [
        RankPiece(rank=rank, local=value, placement=place_whole(reference.shape)) for rank, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("factor", "layout", "words"),
    [
        (4.0, DP_TP, "the size of microbatches"),
        (0.25, DP_TP, "one over the size of microbatches"),
        (2.0, DP_TP, "the size of dp or tp"),
        (0.5, DP_TP, "one over the size of dp or tp"),
        (3.0, DP3_CP2, "the size of dp"),
        (2.0, DP3_CP2, "the size of cp"),
        (9.0, DP3_CP2, "the square of the size of dp"),
        (1.7, DP3_CP2, None),
    ],
)
def test_a_factor_is_named_by_its_axis(factor, layout, words):
    assert name_factor(factor, layout.degrees) == words


def test_a_factor_is_found_and_noise_is_not_one(reference):
    assert find_factor(reference, 2 * reference) == pytest.approx(2.0)
    assert find_factor(reference, 2 * reference + 1e-4 * torch.ones_like(reference)) == pytest.approx(2.0, rel=1e-3)
    assert find_factor(reference, reference + torch.randn(8, 6)) is None
    assert find_factor(reference, reference) is None


def test_a_tensor_that_is_twice_too_large(reference):
    text = describe_tensor(reference, 2 * reference, copies_of(reference, [2 * reference] * 4), DP_TP)
    assert text.startswith("a factor of 2, the size of dp or tp")


def test_one_shard_only(reference):
    found = reference.clone()
    found[4:] += 1
    pieces = rows_of(reference, [(rank, found[4 * (rank % 2) : 4 * (rank % 2) + 4]) for rank in range(4)])
    assert describe_tensor(reference, found, pieces, DP_TP) == "one shard only: tp coordinate 1 (ranks 1, 3)"


def test_the_values_of_another_shard(reference):
    found = reference.clone()
    found[4:] = reference[:4]
    pieces = rows_of(reference, [(rank, found[4 * (rank % 2) : 4 * (rank % 2) + 4]) for rank in range(4)])
    text = describe_tensor(reference, found, pieces, DP_TP)
    assert text == "one shard only: tp coordinate 1 (ranks 1, 3), which holds the values of rank 0's shard"


def test_shards_that_changed_places(reference):
    found = torch.cat((reference[4:], reference[:4]))
    pieces = rows_of(reference, [(rank, found[4 * (rank % 2) : 4 * (rank % 2) + 4]) for rank in range(2)])
    text = describe_tensor(reference, found, pieces, DP_TP)
    assert text == "every shard holds the values of another: rank 0 those of rank 1"


def test_one_replica_only(reference):
    values = [reference, reference, reference + 1, reference + 1]
    text = describe_tensor(reference, reference, copies_of(reference, values), DP_TP)
    assert text == "one replica only: dp coordinate 1 (ranks 2, 3)"


def test_ranks_that_were_never_summed(reference):
    values = [reference * 0.3, reference * 0.3, reference * 0.7 + 0.1, reference * 0.7 + 0.1]
    text = describe_tensor(reference, values[0], copies_of(reference, values), DP_TP)
    assert "not summed over dp" in text


def test_only_the_last_rows(reference):
    found = reference.clone()
    found[6:] += 1
    assert describe_rows(reference, found) == "only the last 2 of 8 rows"
    found = reference.clone()
    found[2:4] += 1
    assert describe_rows(reference, found) == "only rows 2 to 3 of 8"
    found[7] += 1
    assert describe_rows(reference, found) == "3 of 8 rows"
    assert describe_rows(reference, reference + 1) is None


def test_zero_and_not_finite(reference):
    assert describe_tensor(reference, torch.zeros_like(reference), [], DP_TP) == "it is zero"
    assert "not finite" in describe_tensor(reference, reference / 0, [], DP_TP)


def test_numbers():
    assert describe_number(3.0, 6.0, DP3_CP2) == "a factor of 2, the size of cp"
    assert describe_number(3.0, 3.03, DP3_CP2) == "1.01 times the reference, no factor of an axis"
    assert describe_number(3.0, float("nan"), DP3_CP2) == "it is not finite"


def test_spread():
    names = ["a", "b", "c"]
    assert describe_spread(names, names, {}) == "every tensor"
    assert describe_spread(names, ["a"], {}) == "this tensor only"
    assert describe_spread(names, ["a", "b"], {"a": 1, "b": 1}) == "2 of 3 tensors; all have one dim (norms and biases)"
    assert describe_spread(names, ["a", "b"], {"a": 2, "b": 1}) == "2 of 3 tensors"
