"""Replayed samples: the stated share, drawn from the past alone, the same at any position, and nothing lost of the others."""

import numpy as np
import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.data.build import build_splits
from shoal.data.check import check_data
from shoal.data.chosen import Chosen
from shoal.data.config import SyntheticConfig
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


@pytest.mark.parametrize("fresh", ORDERS, ids=["full", "time", "window"])
@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.9])
@pytest.mark.parametrize("epoch", [0, 2])
def test_chosen_samples_have_the_share_and_the_others_come_once_from_any_position(fresh, share, epoch):
    named = [7, 7, "40:43"]
    order = Replayed(fresh, seed=9, share=share, chosen=Chosen(named))
    count = order.count(epoch)
    ids, again = order.ids(epoch, slice(0, count)), order.replayed_ids(epoch, slice(0, count))
    assert len(again) == count - 100 == round(100 * share / (1 - share)) and set(again) <= {7, 40, 41, 42}
    is_replayed = order._replayed_before(np.arange(count))[1]
    assert ids[is_replayed].tolist() == again.tolist()
    assert ids[~is_replayed].tolist() == fresh.ids(epoch, slice(0, 100)).tolist()
    for start in range(0, count - 5, 13):
        later = Replayed(fresh, seed=9, share=share, chosen=Chosen(named))
        assert later.ids(epoch, slice(start, start + 5)).tolist() == ids[start : start + 5].tolist()


def test_a_chosen_sample_is_drawn_as_often_as_it_is_named_in_other_draws_each_epoch():
    order = Replayed(Sequential(10_000), seed=1, share=0.5, chosen=Chosen([7, 7, "40:42", "41:43"]))
    first, second = (order.replayed_ids(epoch, slice(0, order.count(epoch))).tolist() for epoch in (0, 1))
    assert first != second
    for number, times in ((7, 2), (40, 1), (41, 2), (42, 1)):
        assert first.count(number) / len(first) == pytest.approx(times / 6, abs=0.02)


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
    "wrong",
    [
        {"replay": 1.0},
        {"replay": -0.1},
        {"replay_last": 3},
        {"replay": 0.1, "weights": [1.0]},
        {"replay_from": [3]},
        {"replay": 0.1, "replay_last": 3, "replay_from": [3]},
        *({"replay": 0.1, "replay_from": told} for told in ([], "3", [-1], [True], ["3"], ["5:5"], ["1:"], [10**18])),
    ],
)
def test_what_cannot_be_replayed_is_refused(wrong):
    with pytest.raises(RequestError, match="replay"):
        LoaderOptions(**wrong)
    if "weights" not in wrong:
        with pytest.raises(RequestError, match="replay"):
            validate(SyntheticConfig, wrong, origin="recipe")


def test_a_chosen_sample_that_there_is_not_is_refused_before_a_process_starts_and_by_a_loader():
    for told, match in (
        ([80], "names sample 80, and the training split has 80 samples"),
        (["3:90"], "names sample 89"),
    ):
        config = SyntheticConfig(samples=100, validation=0.1, test=0.1, replay=0.1, replay_from=told)
        for refuse in (lambda config=config: check_data(config), lambda config=config: build_splits(config, 0)):
            with pytest.raises(RequestError, match=match):
                refuse()
        with pytest.raises(RequestError, match=match):
            Replayed(Sequential(80), seed=0, share=0.1, chosen=Chosen(told))
    config = config.model_copy(update={"replay_from": (79, "0:80")})
    assert check_data(config).train == 80
    assert build_splits(config, 0).train.options.replay_from == (79, "0:80")
