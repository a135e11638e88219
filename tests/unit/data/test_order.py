"""The order of samples: a permutation, the same for every number of replicas, resumable anywhere."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.data.order import Position, own_microbatches, permute, replica_share, split_positions, take

counts = st.integers(1, 400)
seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, epoch=st.integers(0, 10_000), num_samples=counts)
def test_an_epoch_has_every_sample_once(seed: int, epoch: int, num_samples: int) -> None:
    ids = permute(seed, epoch, num_samples, np.arange(num_samples))
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(num_samples))


@given(seed=seeds, num_samples=st.integers(1, 10**15), data=st.data())
def test_any_position_is_found_without_the_others(seed: int, num_samples: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=20)))
    together = permute(seed, 3, num_samples, positions)
    alone = [int(permute(seed, 3, num_samples, positions[i : i + 1])[0]) for i in range(len(positions))]
    assert together.tolist() == alone
    assert all(0 <= i < num_samples for i in alone)
    assert len(set(alone)) == len(set(positions.tolist()))


def test_seed_and_epoch_change_the_order() -> None:
    positions = np.arange(1000)
    orders = [permute(seed, epoch, 1000, positions).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert sum(a == b for a, b in zip(order, range(1000), strict=True)) < 15


def test_every_order_of_three_is_as_likely() -> None:
    tally = dict.fromkeys(permutations(range(3)), 0)
    for seed in range(3000):
        tally[tuple(permute(seed, 0, 3, np.arange(3)).tolist())] += 1
    assert all(380 < count < 620 for count in tally.values())  # 500 each; six sigma is 122.


def test_neighbours_are_torn_apart() -> None:
    ids = permute(7, 0, 10_000, np.arange(10_000))
    correlation = np.corrcoef(ids[:-1], ids[1:])[0, 1]
    assert abs(correlation) < 0.05
    assert abs(np.corrcoef(ids, np.arange(10_000))[0, 1]) < 0.05


def test_the_order_is_this() -> None:
    """Golden: another order under the same seed would break the resume of every run that was started before."""
    assert permute(1, 0, 10, np.arange(10)).tolist() == [9, 1, 2, 0, 5, 3, 8, 4, 6, 7]


@given(num_samples=counts, global_batch=st.integers(1, 500), steps=st.integers(1, 30))
def test_batches_go_through_each_epoch_once(num_samples: int, global_batch: int, steps: int) -> None:
    position = Position()
    seen: list[tuple[int, int]] = []
    for _ in range(steps):
        epoch = position.epoch
        taken, position = take(position, num_samples, global_batch)
        assert 0 < taken.stop - taken.start <= global_batch
        seen += [(epoch, place) for place in range(taken.start, taken.stop)]
    assert seen == [divmod(i, num_samples) for i in range(len(seen))]
    assert position == Position(epoch=len(seen) // num_samples, offset=len(seen) % num_samples)


@given(size=st.integers(0, 60), num_replicas=st.integers(1, 20))
def test_the_shares_of_all_replicas_are_the_batch_in_order(size: int, num_replicas: int) -> None:
    ids = np.arange(size) * 3
    shares = [replica_share(ids, replica, num_replicas) for replica in range(num_replicas)]
    assert np.concatenate(shares).tolist() == ids.tolist()
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@given(size=st.integers(0, 60), num_replicas=st.integers(1, 6), num_own=st.integers(1, 5))
def test_a_batch_is_cut_alike_however_many_replicas_share_it(size: int, num_replicas: int, num_own: int) -> None:
    ids = np.arange(size)
    shared = [own_microbatches(ids, replica, num_replicas, num_own) for replica in range(num_replicas)]
    alone = own_microbatches(ids, 0, 1, num_replicas * num_own)
    flat = [part.tolist() for own in shared for part in own]
    assert flat == [part.tolist() for part in alone], "the same parts in the same order"
    assert [i for part in flat for i in part] == list(range(size)), "every sample once"
    sizes = [len(part) for part in flat]
    assert all(size > 0 for size in sizes) and (not sizes or max(sizes) - min(sizes) <= 1)
    assert all(len(own) <= num_own for own in shared)


@settings(max_examples=50)
@given(
    num_samples=st.integers(1, 100),
    global_batch=st.integers(1, 40),
    replicas=st.lists(st.integers(1, 7), min_size=1, max_size=25),
    seed=seeds,
)
def test_another_number_of_replicas_at_every_step_neither_repeats_nor_skips(
    num_samples: int, global_batch: int, replicas: list[int], seed: int
) -> None:
    def read(numbers: list[int]) -> list[int]:
        position, seen = Position(), []
        for num_replicas in numbers:
            epoch = position.epoch
            taken, position = take(position, num_samples, global_batch)
            places = np.arange(taken.start, taken.stop)
            for replica in range(num_replicas):
                seen += permute(seed, epoch, num_samples, replica_share(places, replica, num_replicas)).tolist()
        return seen

    assert read(replicas) == read([1] * len(replicas))


@given(total=st.integers(3, 10_000), validation=st.floats(0, 0.45), test=st.floats(0, 0.45))
def test_the_splits_are_everything_once(total: int, validation: float, test: float) -> None:
    train, held_out, final = split_positions(total, validation, test)
    assert [*train, *held_out, *final] == list(range(total))
    assert bool(held_out) == (validation > 0)
    assert bool(final) == (test > 0)
    assert abs(len(held_out) - total * validation) <= 1


def test_a_small_share_is_rounded_up_to_what_is_needed() -> None:
    assert [len(part) for part in split_positions(1000, 0.01, 0.0, needed=33)] == [967, 33, 0]


def test_too_little_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match="has 98 bytes and one sequence of 32 needs 33: 3 splits need at least 99"):
        split_positions(98, 0.05, 0.05, needed=33, what="bytes")
    assert len(split_positions(99, 0.05, 0.05, needed=33, what="bytes")[0]) == 33
    with pytest.raises(RequestError, match="has 2 samples and each split needs 1: 3 splits need at least 3"):
        split_positions(2, 0.1, 0.1)
