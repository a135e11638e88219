"""The rules of a cut: sizes, balance, order, and what never happens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.partition.keys import Groups
from shoal.data.partition.rules import (
    counts_of,
    cut_groups,
    cut_hashes,
    cut_labels,
    cut_rows,
    cut_times,
    even_ranges,
    place_keys,
)

SHARES = (0.8, 0.1, 0.1)


def groups_of(sizes):
    codes = np.repeat(np.arange(len(sizes)), sizes)
    return Groups(codes=np.random.default_rng(1).permutation(codes), names=list(range(len(sizes))))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_the_remainder_is_spread_by_one(num_rows, parts):
    found = even_ranges(num_rows, parts)
    assert [row for part in found for row in part] == list(range(num_rows))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    size, longer = divmod(num_rows, parts)
    assert [part.start for part in found] == [k * size + min(k, longer) for k in range(parts)]


def test_rows_have_their_exact_shares_and_are_mixed():
    sides = cut_rows(1003, SHARES, 0)
    assert np.bincount(sides).tolist() == counts_of(1003, SHARES) and sum(counts_of(1003, SHARES)) == 1003
    assert 0.7 < (sides[:500] == 0).mean() < 0.9
    assert (sides != cut_rows(1003, SHARES, 1)).any()


@given(st.lists(st.integers(0, 30), min_size=4, max_size=200), st.integers(0, 6))
def test_nothing_is_trained_on_that_is_later(times, gap):
    times = np.array(times)
    sides = cut_times(times, np.arange(len(times)), SHARES, gap)
    for early, late in itertools.combinations(range(3), 2):
        before, after = times[sides == early], times[sides == late]
        if len(before) and len(after):
            assert before.max() + gap < after.min()


def test_rows_within_the_gap_are_left_out():
    sides = cut_times(np.arange(100), np.arange(100), SHARES, 5.0)
    assert np.flatnonzero(sides < 0).tolist() == [*range(75, 80), *range(85, 90)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 8))
def test_no_part_has_more_than_the_mean_and_the_largest_key(sizes, parts):
    groups = groups_of(sizes)
    sides = cut_groups(groups, [1 / parts] * parts, seed=0)
    loads = np.bincount(sides, minlength=parts)
    assert loads.max() <= sum(sizes) / parts + max(sizes)
    for code in range(len(sizes)):
        assert len(set(sides[groups.codes == code].tolist())) == 1


def test_no_part_has_more_than_four_thirds_of_the_best():
    draws = np.random.default_rng(0)
    for _ in range(40):
        sizes = draws.integers(1, 30, size=8).tolist()
        best = min(
            max(np.bincount(owner, weights=sizes, minlength=3))
            for owner in itertools.product(range(3), repeat=len(sizes))
        )
        loads = np.bincount(cut_groups(groups_of(sizes), [1 / 3] * 3, seed=0), minlength=3)
        assert loads.max() <= best * 4 / 3


def test_heavy_keys_are_split_only_where_it_is_allowed():
    groups = groups_of([1000, 10, 10, 10])
    whole = cut_groups(groups, [0.25] * 4, seed=0)
    parted = cut_groups(groups, [0.25] * 4, seed=0, split_heavy=True)
    assert np.bincount(whole).max() == 1000 and np.bincount(parted).max() <= 262


@given(st.lists(st.integers(20, 200), min_size=1, max_size=6))
def test_every_label_has_the_same_share(sizes):
    groups = groups_of(sizes)
    sides = cut_labels(groups, SHARES, 0)
    for side, share in enumerate(SHARES):
        assert abs((sides == side).sum() - share * sum(sizes)) <= 1.5
        for code, size in enumerate(sizes):
            assert abs((sides[groups.codes == code] == side).sum() - share * size) <= 2


def test_a_hash_moves_nothing_when_rows_come():
    names = [f"user{number}" for number in range(3000)]
    few = Groups(codes=np.arange(1000), names=names[:1000])
    many = Groups(codes=np.arange(3000), names=names)
    before, after = cut_hashes(few.hashes(0), SHARES), cut_hashes(many.hashes(0), SHARES)
    assert (before == after[:1000]).all()
    assert np.bincount(after)[0] == pytest.approx(2400, abs=90)


@pytest.mark.parametrize("parts", [2, 5, 8])
def test_one_part_more_moves_its_share_of_keys(parts):
    hashes = Groups(codes=np.arange(8000), names=list(range(8000))).hashes(0)
    before, after = place_keys(hashes, parts), place_keys(hashes, parts + 1)
    moved = before != after
    assert (after[moved] == parts).all()
    assert moved.mean() == pytest.approx(1 / (parts + 1), rel=0.15)
