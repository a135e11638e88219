"""Receipts as values: the sums, what a run goes on with, and every difference named."""

import json
from dataclasses import replace

import numpy as np
import pytest

from shoal.core.errors import RunError
from shoal.data.receipt import (
    Counted,
    RankCount,
    ReceiptState,
    add_replicas,
    hash_range,
    hash_rows,
    refuse_difference,
    share_of_range,
    taken_up,
)


def mixed(number, key):
    """The hash of one half, a number at a time, with Python's own arithmetic."""
    mask = (1 << 64) - 1
    value = (number * 0xBF58476D1CE4E5B9 + key) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & mask
    return value ^ (value >> 31)


def test_sums_are_those_of_a_second_implementation_with_all_carries():
    ids = np.array([0, 1, 2, 7, 10**10, 2**62], dtype=np.int64)
    each = [mixed(one, 0x9E3779B97F4A7C15) + (mixed(one, 0xD1B54A32D192ED03) << 64) for one in ids.tolist()]
    assert hash_rows(ids) == sum(each) % 2**128
    many = np.tile(ids, 1000)
    assert hash_rows(many) == sum(each) * 1000 % 2**128
    assert hash_rows(ids[:0]) == 0
    assert f"{hash_rows(np.arange(1000)):032x}" == "ed452917db4bb6202d2731aa73509618"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_of_all_ranks_are_the_whole(size):
    whole = hash_rows(np.arange(100_003))
    assert hash_range(range(100_003)) == whole
    assert sum(hash_range(share_of_range(100_003, rank, size)) for rank in range(size)) % 2**128 == whole


def test_counts_add_and_subtract_modulo_2_128():
    first, second = Counted.of(np.arange(5)), Counted.of(np.arange(5, 9))
    assert first + second == Counted.of(np.arange(9)[::-1].copy())
    assert first + second - first == second
    assert Counted() - first + first == Counted()


def test_a_state_is_json_and_comes_back():
    state = ReceiptState(epoch=3, rows=7, total=2**128 - 5, order="9 samples", reason="", proved=2)
    assert ReceiptState.from_values(json.loads(json.dumps(state.as_values()))) == state


@pytest.mark.parametrize(
    "change",
    [
        {"total": 5},
        {"total": "5"},
        {"total": "g" * 32},
        {"rows": -1},
        {"rows": True},
        {"epoch": "1"},
        {"order": 3},
        {"x": 1},
    ],
)
def test_a_state_that_is_none_is_refused(change):
    with pytest.raises((ValueError, TypeError)):
        ReceiptState.from_values({**ReceiptState().as_values(), **change})


def test_what_a_run_goes_on_with():
    state = ReceiptState(epoch=2, rows=4, total=9, order="a", proved=2)
    assert taken_up(state, epoch=2, offset=4, order="a") == state
    assert taken_up(state, epoch=3, offset=0, order="b") == ReceiptState(epoch=3, order="b", proved=2)
    assert "without a receipt" in taken_up(None, epoch=2, offset=4, order="a").reason
    assert "began with a, and goes on with b" in taken_up(state, epoch=2, offset=4, order="b").reason
    assert "of epoch 2" in taken_up(state, epoch=1, offset=4, order="a").reason
    fresh = state.next_epoch(is_proved=True)
    assert fresh == ReceiptState(epoch=3, order="a", proved=3)
    assert replace(state, reason="x").next_epoch(is_proved=False) == replace(fresh, proved=2)


def test_a_replica_counts_once_however_many_ranks_compute_it():
    ids = [np.arange(0, 4), np.arange(4, 7)]
    parts = [RankCount(rank=rank, replica=rank // 2, counted=Counted.of(ids[rank // 2])) for rank in range(4)]
    assert add_replicas(parts) == Counted.of(np.arange(7))
    parts[3] = replace(parts[3], counted=Counted.of(np.arange(5, 8)))
    with pytest.raises(RunError, match="ranks 2 and 3 compute replica 1 together and trained on different samples"):
        add_replicas(parts)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], "9 samples and the data has 10: 1 are missing"),
        ([*range(10), 3], "11 samples and the data has 10: 1 are too many"),
        ([0, 0, *range(2, 10)], "10 samples and the data has 10: some are not the right ones"),
    ],
)
def test_every_difference_is_told(ids, said):
    refuse_difference(4, Counted.of(np.arange(10)[::-1].copy()), Counted.of(np.arange(10)))
    with pytest.raises(RunError, match=f"epoch 4 trained on {said}"):
        refuse_difference(4, Counted.of(np.array(ids)), Counted.of(np.arange(10)))
