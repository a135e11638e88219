"""The layout of ZeRO: every element has one owner, cuts are legal, and shares are even."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.optim.flat import CUT_MULTIPLE
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.zero.layout import ROOT, Pool, lay_out


class Bag(nn.Module):
    """Parameters of any shapes, all in the root unit."""

    def __init__(self, shapes):
        super().__init__()
        for place, shape in enumerate(shapes):
            self.register_parameter(f"p{place:02d}", nn.Parameter(torch.empty(shape, device="meta")))


class Stacked(nn.Module):
    """An embedding, blocks, a norm and an output layer that may share the embedding's weight."""

    def __init__(self, is_tied):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight


ANALYSIS = ModuleAnalysis(stacks=(Stack(blocks=("blocks.0", "blocks.1", "blocks.2")),))
shapes = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(shapes=shapes, num_ranks=st.integers(1, 5))
def test_every_row_has_one_owner_and_every_cut_is_legal(shapes, num_ranks):
    (unit,) = lay_out(Bag(shapes), ModuleAnalysis(), num_ranks).units
    assert [slot.shape for slot in unit.slots] == shapes
    end = 0
    for slot in unit.slots:
        assert slot.offset >= end and slot.offset % CUT_MULTIPLE == 0
        end = slot.offset + slot.numel
        num_rows = slot.shape[0] if slot.shape else 1
        assert slot.cuts[0] == 0 and slot.cuts[-1] == num_rows and list(slot.cuts) == sorted(slot.cuts)
        assert all(cut in (0, num_rows) or cut * slot.row % CUT_MULTIPLE == 0 for cut in slot.cuts)
        for rank in range(num_ranks):
            first, stop = slot.rows(rank)
            if first < stop:
                offset = unit.local_offset(slot, rank)
                assert offset >= 0 and offset + (stop - first) * slot.row <= unit.counts[rank]
    assert unit.size >= end and unit.size % CUT_MULTIPLE == 0


def test_pieces_of_one_rank_do_not_overlap():
    (unit,) = lay_out(Bag([(7, 5), (3,), (33,), (), (16, 16)]), ModuleAnalysis(), 3).units
    for rank in range(3):
        taken = sorted(
            (unit.local_offset(slot, rank), (slot.rows(rank)[1] - slot.rows(rank)[0]) * slot.row)
            for slot in unit.slots
            if slot.rows(rank)[0] < slot.rows(rank)[1]
        )
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(taken))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_shares_are_even_to_a_row(num_ranks):
    (unit,) = lay_out(Bag([(64, 32), (64,), (32, 64), (48, 32)]), ModuleAnalysis(), num_ranks).units
    even = unit.size / num_ranks
    assert all(abs(count - even) <= 64 for count in unit.counts)


def test_units_are_blocks_layers_outside_them_and_the_rest():
    layout = lay_out(Stacked(is_tied=False), ANALYSIS, 2)
    assert [unit.path for unit in layout.units] == [ROOT, "embedding", *ANALYSIS.stacks[0].blocks, "head"]
    assert layout.root == 0
    # Attention reads its output layer's weight without calling it; a hook there would never run.
    names = [slot.name for slot in layout.units[0].slots]
    assert "attention.out_proj.weight" in names and not any("frozen" in name for name in names)
    assert [visit.units for visit in layout.visits] == [(1,), (2,), (3,), (4,), (5,)]
    assert [visit.reads_in_backward for visit in layout.visits] == [False, True, True, True, True]


def test_a_tied_weight_is_in_the_first_unit_and_both_modules_ask_for_it():
    layout = lay_out(Stacked(is_tied=True), ANALYSIS, 2)
    assert "head" not in [unit.path for unit in layout.units]
    assert {visit.path: visit.units for visit in layout.visits}["head"] == (1,)


def test_buffers_have_two_sizes_beside_the_root():
    layout = lay_out(Stacked(is_tied=False), ANALYSIS, 2)
    block = max(unit.size for unit in layout.units if unit.is_block)
    root = layout.units[0].size
    assert layout.capacities() == (root, 50 * 16, block, block, block, 50 * 16)


def test_shards_make_the_whole():
    layout = lay_out(Stacked(is_tied=False), ANALYSIS, 3)
    assert sum(layout.shard_size(rank) for rank in range(3)) == layout.size
    assert layout.size >= sum(math.prod(slot.shape) for unit in layout.units for slot in unit.slots)


def test_a_unit_that_comes_back_finds_its_contents():
    pool = Pool([10, 10, 20])
    first, is_there = pool.take(0)
    assert not is_there
    pool.let_go(first)
    assert pool.take(0) == (first, True)


def test_another_unit_takes_the_place_and_the_contents_are_lost():
    pool = Pool([10, 10, 20])
    place, _ = pool.take(0)
    pool.let_go(place)
    assert pool.take(1) == (place, False)
    pool.let_go(place)
    assert pool.take(0) == (place, False)
    assert pool.sizes == [10]


def test_a_taken_buffer_is_never_given_away_and_sizes_do_not_mix():
    pool = Pool([10, 10, 20])
    places = [pool.take(unit)[0] for unit in range(3)]
    assert len(set(places)) == 3
    assert pool.sizes == [10, 10, 20]


def test_the_longest_unused_buffer_goes_first():
    pool = Pool([10] * 3)
    first, second = pool.take(0)[0], pool.take(1)[0]
    pool.let_go(second)
    pool.let_go(first)
    assert pool.take(2) == (second, False)
    assert pool.take(0) == (first, True)


def test_after_forgetting_everything_is_gathered_anew():
    pool = Pool([10, 10])
    place, _ = pool.take(0)
    pool.let_go(place)
    pool.forget()
    assert pool.take(0) == (place, False)
