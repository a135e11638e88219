"""Replayed samples: the stated share, drawn from the past alone, the same at any position, and nothing lost of the others."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.options import LoaderOptions
from shoal.data.sampling.replay import Replayed
from shoal.data.sampling.samplers import Sequential, Shuffled
from shoal.data.sampling.window import Windowed, even_blocks

ORDERS = [Shuffled(4, 100), Sequential(100), Windowed(4, even_blocks(100, 8), 3)]


@pytest.mark.parametrize("fresh", ORDERS, ids=["full", "time", "window"])
@pytest.mark.parametrize("share", [0.1, 0.25, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("last", [None, 7])
@pytest.mark.parametrize("epoch", [0, 2])
def test_new_samples_come_once_in_their_order_and_the_rest_is_of_the_past(fresh, share, last, epoch):
    order = Replayed(fresh, seed=9, share=share, last=last)
    count = order.count(epoch)
    ids, again = order.ids(epoch, slice(0, count)), order.replayed_ids(epoch, slice(0, count))
    assert len(again) / count == pytest.approx(share, abs=0.01) and count == len(again) + 100
    positions = np.arange(count)
    is_replayed = order._replayed_before(positions)[1]
    new = ids[~is_replayed].tolist()
    assert new == fresh.ids(epoch, slice(0, 100)).tolist()
    assert ids[is_replayed].tolist() == again.tolist()
    for place in np.flatnonzero(is_replayed).tolist():
        met = ids[:place][~is_replayed[:place]].tolist()
        if last is not None:
            met = met[-last:]
        assert (epoch and last is None) or ids[place] in met, f"position {place}"
    for start in range(0, count - 5, 13):
        assert order.ids(epoch, slice(start, start + 5)).tolist() == ids[start : start + 5].tolist()


def test_draws_differ_by_seed_epoch_and_position_and_reach_all_of_the_past():
    def again(seed, epoch):
        order = Replayed(Sequential(100), seed=seed, share=0.5)
        return order.replayed_ids(epoch, slice(0, order.count(epoch))).tolist()

    assert again(1, 1) != again(2, 1) != again(1, 2) and again(1, 1) == again(1, 1)
    assert len(set(again(1, 1))) > 50


def test_ten_billion_samples_are_no_more_work_than_a_hundred():
    order = Replayed(Shuffled(1, 10**10), seed=1, share=0.1)
    assert order.count(0) == 10**10 * 10 // 9
    ids = order.ids(0, slice(9 * 10**9, 9 * 10**9 + 1000))
    assert len(np.unique(ids)) == 1000 and ids.max() < 10**10


@pytest.mark.parametrize(
    "wrong", [{"replay": 1.0}, {"replay": -0.1}, {"replay_last": 3}, {"replay": 0.1, "weights": [1.0]}]
)
def test_what_cannot_be_replayed_is_refused(wrong):
    with pytest.raises(RequestError, match="replay"):
        LoaderOptions(**wrong)
