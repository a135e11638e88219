"""Rates that adapt: the pure rules against values worked out by hand, and their bounds."""

import math

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError, RunError
from shoal.optim import adapt
from shoal.optim.config import OptimConfig


def test_scaling_is_linear_or_by_the_root_and_happens_once():
    linear = OptimConfig(lr=0.1, scale="linear", scale_base=32)
    assert adapt.scaled(linear, 128).lr == pytest.approx(0.4)
    assert adapt.scaled(adapt.scaled(linear, 128), 128).lr == pytest.approx(0.4)
    assert adapt.scaled(linear.model_copy(update={"scale": "sqrt"}), 128).lr == pytest.approx(0.2)
    assert adapt.scaled(OptimConfig(lr=0.1), 128).lr == 0.1
    assert "0.1 x 128 / 32 = 0.4" in (adapt.describe_scale(linear, 128) or "")


def test_noise_of_two_scalar_gradients_is_what_the_hand_says():
    # Shares 1 and 3, each half of the batch: parts 0.5 and 1.5. L = 5, T = 4, G2 = (2*4-5)/1 = 3, V = 1.
    small, count = adapt.mean_square([0.25, 2.25], [0.5, 0.5])
    assert (small, count) == (5.0, 2)
    state = adapt.after_shares(
        adapt.NoiseState(), adapt.Shares(small=5.0, large=4.0, count=2), scale=1.0, smoothing=0.9
    )
    assert adapt.averages(state) == (pytest.approx(3.0), pytest.approx(1.0))
    assert adapt.noise_scale(state, 8) == pytest.approx(8 / 3)
    assert adapt.gain(state, scale=4.0) == pytest.approx(4 / 3.25)


def test_one_share_or_a_wild_one_changes_nothing():
    state = adapt.NoiseState()
    for found in (adapt.Shares(small=1, large=1, count=1), adapt.Shares(small=math.nan, large=1, count=2)):
        assert adapt.after_shares(state, found, scale=1.0, smoothing=0.9) == state
    assert adapt.gain(state, scale=8.0) == 1.0


def test_the_gain_goes_from_one_to_the_scale():
    quiet = adapt.NoiseState(square=1e9, variance=0.0, weight=1.0)
    noisy = adapt.NoiseState(square=0.0, variance=1.0, weight=1.0)
    assert adapt.gain(quiet, scale=8.0) == pytest.approx(1.0)
    assert adapt.gain(noisy, scale=8.0) == pytest.approx(8.0)
    assert adapt.rate_gain("adamw", 4.0) == 2.0
    assert adapt.rate_gain("sgd", 4.0) == 4.0


def test_bold_raises_lowers_and_stays_in_its_bounds():
    config = OptimConfig(adapt="bold")
    state = adapt.BoldState()
    factors = []
    for loss in (2.0, 1.0, 1.0, 1.5, math.nan):
        state = adapt.after_evaluation(state, loss, config)
        factors.append(state.factor)
    assert factors == pytest.approx([1.0, 1.05, 1.05, 0.525, 0.2625])
    for _ in range(20):
        state = adapt.after_evaluation(state, math.inf, config)
    assert state.factor == 0.05


def test_hyper_follows_the_cosine():
    config = OptimConfig(adapt="hyper", adapt_step=0.1)
    assert adapt.after_cosine(adapt.HyperState(), 1.0, config).factor == pytest.approx(1.1)
    assert adapt.after_cosine(adapt.HyperState(), -0.5, config).factor == pytest.approx(0.95)
    assert adapt.after_cosine(adapt.HyperState(), math.nan, config).factor == 1.0


@pytest.mark.parametrize("rule", ["noise", "adascale", "bold", "hyper"])
def test_states_survive_json_and_impossible_ones_are_refused(rule):
    config = OptimConfig(adapt=rule, scale_base=8)
    state = adapt.begin(config)
    assert adapt.from_values(config, adapt.as_values(state)) == state
    key = "factor" if rule in ("bold", "hyper") else "weight"
    with pytest.raises(RunError, match=key):
        adapt.from_values(config, {key: -1})


@pytest.mark.parametrize(
    "keys",
    [
        {"scale": "linear"},
        {"adapt": "adascale"},
        {"adapt": "adascale", "scale_base": 8, "scale": "sqrt"},
        {"adapt": "bold", "schedule": "plateau"},
        {"adapt_bounds": (2.0, 10.0)},
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys):
    with pytest.raises(RequestError):
        validate(OptimConfig, keys, origin="recipe")
