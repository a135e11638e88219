"""Windows of blocks: every sample once, computed at any position, the same for any number of replicas, and of known quality."""

import time

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.loading.parts import Share, build_order, order_parts
from shoal.data.options import LoaderOptions
from shoal.data.order import Position, own_microbatches, take
from shoal.data.sampling.quality import measure_order
from shoal.data.sampling.samplers import Sequential, Shuffled
from shoal.data.sampling.window import Windowed, check_blocks, describe_window, even_blocks, expected_chi2
from shoal.data.sources.arrays import ArraySource

RAGGED = np.array([0, 3, 4, 11, 12, 20, 27, 30], dtype=np.int64)
GOLDEN_RAGGED = [
    27,
    28,
    29,
    11,
    26,
    7,
    20,
    4,
    6,
    10,
    8,
    5,
    9,
    24,
    25,
    22,
    23,
    21,
    0,
    3,
    1,
    2,
    16,
    19,
    15,
    12,
    13,
    18,
    14,
    17,
]
GOLDEN_BIG = [2999678567, 9093119169, 9715576796, 8843780437]


def window_ids(starts, window, *, seed=1, epoch=0, start=0, stop=None):
    return Windowed(seed, starts, window).ids(epoch, slice(start, int(starts[-1]) if stop is None else stop))


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("epoch", [0, 5])
def test_every_sample_comes_once_and_a_window_is_read_before_the_next(window, epoch):
    ids = window_ids(RAGGED, window, epoch=epoch)
    assert sorted(ids.tolist()) == list(range(30))
    blocks = np.searchsorted(RAGGED, ids, side="right") - 1
    met = list(dict.fromkeys(blocks.tolist()))
    first = 0
    for number in range(0, len(met), window):
        size = sum(int(RAGGED[block + 1] - RAGGED[block]) for block in met[number : number + window])
        assert set(blocks[first : first + size].tolist()) == set(met[number : number + window])
        first += size


def test_any_part_of_an_epoch_is_the_same_part_of_the_whole():
    whole = window_ids(RAGGED, 2)
    for start in range(30):
        for stop in (start + 1, min(30, start + 9)):
            assert window_ids(RAGGED, 2, start=start, stop=stop).tolist() == whole[start:stop].tolist()
    assert window_ids(RAGGED, 2, epoch=1).tolist() != whole.tolist()
    assert window_ids(RAGGED, 2, seed=2).tolist() != whole.tolist()


def test_golden_orders_do_not_change_between_versions():
    # A run that is resumed by a later version must go on in the same order.
    assert window_ids(RAGGED, 2).tolist() == GOLDEN_RAGGED
    assert (
        window_ids(even_blocks(10**10, 4096), 512, seed=7, epoch=3, start=10**9, stop=10**9 + 4).tolist() == GOLDEN_BIG
    )


def test_ten_billion_rows_cost_what_their_blocks_do():
    starts = even_blocks(10**10 + 17, 1 << 14)  # the last block is short
    sampling = Windowed(3, starts, 1024)
    sampling.ids(0, slice(0, 1))
    begun = time.process_time()
    positions = [0, 10**10 + 16, *np.random.default_rng(0).integers(0, 10**10, 100).tolist()]
    found = [int(sampling.ids(0, slice(position, position + 1))[0]) for position in positions]
    seconds = (time.process_time() - begun) / len(positions)
    assert seconds < 0.02, f"{seconds * 1e3:.1f} ms of processor time for a position"
    assert len(set(found)) == len(positions)
    assert all(0 <= one < 10**10 + 17 for one in found)
    # A window is a bijection onto the rows of its blocks, sampled where two windows meet.
    edge = int(sampling._firsts[7])
    stretch = sampling.ids(0, slice(edge - 5000, edge + 5000))
    assert len(np.unique(stretch)) == 10_000
    blocks = np.searchsorted(starts, stretch, side="right") - 1
    assert not set(blocks[:5000].tolist()) & set(blocks[5000:].tolist())


def test_a_change_of_replicas_in_the_middle_of_an_epoch_loses_and_repeats_nothing():
    source = ArraySource((np.arange(30, dtype=np.int64)[:, None],), np.arange(30), rows=range(30), uniform_weight=1)
    source.block_starts = RAGGED
    source.options = LoaderOptions(order="window", window=3)
    order, position, seen = build_order(source, global_batch=4, seed=5), Position(), []
    for num_replicas in (2, 3, 1, 4, 2, 3, 4, 1):
        ids, _, after = order.take(position)
        shares = [own_microbatches(ids, replica, num_replicas, 1) for replica in range(num_replicas)]
        seen += [int(one) for parts in shares for part in parts for one in part]
        again = next(order_parts(build_order(source, global_batch=4, seed=5), position, Share()))
        assert np.concatenate(again.microbatches).tolist() == ids.tolist()
        assert after == take(position, 30, 4)[1]
        position = after
    assert position == Position(epoch=1)
    assert sorted(seen) == list(range(30))


def test_quality_keeps_its_bars_and_follows_the_formula():
    starts, batch = even_blocks(64_000, 32), 64
    perfect = measure_order(Shuffled(0, 64_000), starts, batch=batch, cache_blocks=320)
    assert 0.9 < perfect.chi2 < 1.1 and 0.8 < perfect.variance_ratio < 1.2 and abs(perfect.lag1) < 0.1
    window = measure_order(Windowed(0, starts, 5 * batch), starts, batch=batch, cache_blocks=5 * batch)
    assert window.chi2 <= 1.3 and window.fetches_per_block <= 1.02
    assert window.chi2 == pytest.approx(expected_chi2(blocks=2000, window=320, batch=batch), abs=0.2)
    narrow = measure_order(Windowed(0, starts, 16), starts, batch=batch, cache_blocks=16)
    assert narrow.chi2 == pytest.approx(expected_chi2(blocks=2000, window=16, batch=batch), rel=0.25)
    assert perfect.fetches_per_block > 20, "a full shuffle with a small cache fetches a block for nearly every sample"
    lying = measure_order(Sequential(64_000), starts, batch=batch, cache_blocks=4)
    assert lying.chi2 > 50 and lying.lag1 > 0.9 and lying.blocks_per_batch == 2 and lying.fetches_per_block == 1


def test_what_mixes_poorly_is_told_with_the_window_that_would_do():
    assert describe_window(even_blocks(64_000, 32), 320, 64) is None
    assert "a window of 214 would do" in str(describe_window(even_blocks(64_000, 32), 16, 64))


@pytest.mark.parametrize("starts", [[0, 5, 5, 30], [1, 30], [0, 29], [0], [0, 20, 10, 30]])
def test_blocks_that_are_none_are_refused(starts):
    with pytest.raises(RequestError, match="must begin at sample 0, rise, and end with the 30 samples"):
        check_blocks(np.array(starts), 30)


def test_options_that_contradict_each_other_are_refused():
    for wrong in (
        {"order": "window"},
        {"window": 3},
        {"order": "time", "weights": [1.0]},
        {"order": "time", "shuffle": False},
    ):
        with pytest.raises(RequestError, match="order"):
            LoaderOptions(**wrong)
