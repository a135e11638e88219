"""Extremes, means and counts of what is not finite, at every zoom."""

import numpy as np
import pytest

from shoal.dashboard.runs.pyramid import Pyramid, finite_list


def pyramid_of(values):
    made = Pyramid()
    made.extend(np.asarray(values, float))
    return made


@pytest.mark.parametrize("points", [1, 2, 10, 100, 1000, 5000])
@pytest.mark.parametrize("place", [0, 1, 499_999, 777_777, 999_999])
def test_a_spike_of_one_step_in_a_million_is_seen(points, place):
    values = np.zeros(1_000_000)
    values[place] = 9.0
    values[place - 5] = -9.0
    buckets, middles, exact = pyramid_of(values).cut(0, len(values), points)
    assert buckets.high.max() == 9.0 and buckets.low.min() == -9.0 and not exact
    assert len(buckets.high) <= 2 * points + 2
    # Within a bucket's width of where it was.
    assert abs(middles[buckets.high.argmax()] - place) <= 2 * max(1_000_000 // points, 4096)


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_what_all_their_values_say(seed):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=int(draw.integers(1, 30_000)))
    values[draw.random(len(values)) < 0.01] = np.nan
    values[draw.random(len(values)) < 0.01] = np.inf
    first, last = sorted(draw.integers(0, len(values) + 1, 2).tolist())
    points = int(draw.integers(1, 400))
    buckets, middles, exact = pyramid_of(values).cut(first, last, points)
    window = values[first:last]
    good = window[np.isfinite(window)]
    assert buckets.bad.sum() == len(window) - len(good)
    assert len(middles) == len(buckets.low) and (np.diff(middles) > 0).all()
    assert len(middles) <= 2 * points + 2 and exact == (last - first <= points)
    if len(good):
        assert np.nanmin(buckets.low) == good.min() and np.nanmax(buckets.high) == good.max()
        assert ((middles >= first) & (middles < last)).all()
    ends = [first, *((middles[1:] + middles[:-1]) // 2), last]
    assert len(ends) == len(middles) + 1


@pytest.mark.parametrize("seed", range(10))
def test_growing_is_as_if_all_had_been_there(seed):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=20_000)
    grown, at = Pyramid(), 0
    while at < len(values):
        before, at = at, min(at + int(draw.integers(1, 6000)), len(values))
        # Now and then some of it is taken back, and comes again.
        back = int(draw.integers(0, before + 1)) if draw.random() < 0.3 else before
        grown.shorten(back)
        grown.extend(values[back:at])
    one, _, _ = grown.cut(3, 19_990, 50)
    other, _, _ = pyramid_of(values).cut(3, 19_990, 50)
    for name in ("low", "high", "bad"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.mean == pytest.approx(other.mean)


def test_what_was_taken_back_is_gone():
    made = pyramid_of(np.full(10_000, 5.0))
    made.shorten(0)
    made.extend(np.ones(5_000))
    buckets, _, _ = made.cut(0, 5_000, 10)
    assert buckets.high.max() == 1.0


def test_json_has_no_numbers_that_are_not_finite():
    assert finite_list(np.array([1.0, np.nan, np.inf])) == [1.0, None, None]
    assert finite_list(np.array([1, 2])) == [1, 2]
