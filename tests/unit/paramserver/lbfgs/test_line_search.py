"""The line search alone: what it chooses meets the strong Wolfe conditions, whatever the function."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lbfgs import _strong_wolfe as torch_strong_wolfe

from shoal.paramserver.lbfgs.line_search import Point, interpolate, search

FUNCTIONS = {
    "parabola": (lambda x: (x - 3) ** 2, lambda x: 2 * (x - 3)),
    "far": (lambda x: (x - 300) ** 2, lambda x: 2 * (x - 300)),
    "near": (lambda x: (x - 1e-3) ** 2, lambda x: 2 * (x - 1e-3)),
    "quartic": (lambda x: (x - 2) ** 4, lambda x: 4 * (x - 2) ** 3),
    "wave": (lambda x: math.cos(x) - x / 10 + x * x / 400, lambda x: -math.sin(x) - 0.1 + x / 200),
    "barrier": (
        lambda x: -math.log(5 - x) - 2 * x if x < 5 else math.nan,
        lambda x: 1 / (5 - x) - 2 if x < 5 else math.nan,
    ),
    "overflow": (lambda x: math.inf if x > 4 else (x - 1) ** 2, lambda x: math.inf if x > 4 else 2 * (x - 1)),
}


def run(value, slope, first_step, max_trials=25):
    start = Point(trial=0, step=0.0, loss=value(0.0), slope=slope(0.0))
    searching = search(start, first_step, width=1.0, least_width=1e-12, max_trials=max_trials)
    ask, asks = next(searching), []
    while True:
        asks.append(ask)
        point = Point(trial=ask.trial, step=ask.step, loss=value(ask.step), slope=slope(ask.step))
        try:
            ask = searching.send(point)
        except StopIteration as end:
            return start, end.value, asks


@pytest.mark.parametrize("first_step", [1e-4, 0.1, 1.0, 50.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_chosen_point_meets_both_conditions(name, first_step):
    start, chosen, asks = run(*FUNCTIONS[name], first_step)
    assert chosen.loss <= start.loss + 1e-4 * chosen.step * start.slope
    assert abs(chosen.slope) <= 0.9 * abs(start.slope)
    assert [ask.trial for ask in asks] == list(range(1, len(asks) + 1))


@pytest.mark.parametrize("max_trials", range(1, 8))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_asks_no_more_often_than_allowed_and_never_ends_higher(name, max_trials):
    start, chosen, asks = run(*FUNCTIONS[name], 40.0, max_trials)
    assert len(asks) <= max_trials
    assert chosen.loss <= start.loss


@settings(max_examples=60, deadline=None)
@given(minimum=st.floats(1e-3, 1e3), scale=st.floats(1e-2, 1e2), first=st.floats(1e-3, 1e2))
def test_what_is_chosen_was_kept(minimum, scale, first):
    """The gradient of a trial that was let go cannot be chosen."""
    value, slope = lambda x: scale * (x - minimum) ** 2 + abs(x - minimum), None
    slope = lambda x: 2 * scale * (x - minimum) + math.copysign(1, x - minimum)  # noqa: E731
    _, chosen, asks = run(value, slope, first)
    kept = {0, asks[0].trial}
    for ask in asks:
        kept = (kept & ask.keep) | {ask.trial}
    assert chosen.trial in kept


def test_the_cubic_finds_the_minimum_of_a_cubic():
    value, slope = lambda x: x**3 - 3 * x, lambda x: 3 * x * x - 3
    ends = [Point(trial=0, step=x, loss=value(x), slope=slope(x)) for x in (0.0, 2.0)]
    assert interpolate(*ends, (0.0, 2.0)) == pytest.approx(1.0)
    assert interpolate(*reversed(ends), (0.0, 2.0)) == interpolate(*ends, (0.0, 2.0))
    assert interpolate(*ends, (1.5, 2.0)) == 1.5


def test_without_a_cubic_the_middle_is_tried():
    flat = Point(trial=0, step=0.0, loss=1.0, slope=0.0)
    for other in (
        Point(trial=1, step=2.0, loss=math.inf, slope=0.0),
        Point(trial=1, step=2.0, loss=1.0, slope=0.0),
        Point(trial=1, step=0.0, loss=2.0, slope=1.0),
        Point(trial=1, step=1.0, loss=1e300, slope=1e300),
    ):
        assert interpolate(flat, other, (0.0, 2.0)) in (1.0, 0.0)


def waves(seed):
    """A function of many waves over a wide bowl, and its slope, going down at 0."""
    draw = random.Random(seed)
    parts = [(draw.uniform(0.1, 2), draw.uniform(0.2, 6), draw.uniform(0, 6.3)) for _ in range(4)]
    pull = draw.uniform(0.001, 0.2)

    def value(x):
        return sum(a * math.cos(b * x + c) for a, b, c in parts) + pull * x * x

    def slope(x):
        return -sum(a * b * math.sin(b * x + c) for a, b, c in parts) + 2 * pull * x

    return (value, slope) if slope(0.0) < 0 else (lambda x: value(-x), lambda x: -slope(-x))


def torch_search(value, slope, first_step, max_trials):
    """The trials of torch's own search, and the step that it chose."""
    trials = []

    def evaluate(_, step, __):
        trials.append(float(step))
        return value(float(step)), torch.tensor([slope(float(step))], dtype=torch.float64)

    start = torch.tensor([slope(0.0)], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    # Its count leaves out the first trial.
    arguments = (evaluate, None, first_step, one, value(0.0), start, start[0])
    _, _, chosen, _ = torch_strong_wolfe(*arguments, tolerance_change=1e-12, max_ls=max_trials - 1)
    return trials, float(chosen)


@pytest.mark.parametrize("first_step", [0.1, 0.3, 1.0, 30.0])
def test_every_trial_is_that_of_torch(first_step):
    lengths = set()
    for seed in range(250):
        value, slope = waves(seed)
        _, chosen, asks = run(value, slope, first_step)
        trials, theirs = torch_search(value, slope, first_step, 25)
        assert [ask.step for ask in asks] == pytest.approx(trials, rel=1e-6), seed
        assert chosen.step == pytest.approx(theirs, rel=1e-6), seed
        lengths.add(len(trials))
    assert len(lengths) > 3, "searches of one length show little"
