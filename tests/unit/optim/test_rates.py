"""Learning rates: exact values at the ends, monotony between, and what plateau remembers."""

import json
import math
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.config import OptimConfig
from shoal.optim.rates import PlateauState, after_evaluation, rate

SCHEDULES = ["constant", "cosine", "linear", "inverse_sqrt", "plateau"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_in_equal_parts_and_ends_exactly_at_lr(schedule):
    config = OptimConfig(lr=0.3, schedule=schedule, warmup=4)
    assert [rate(config, step, 100) for step in range(4)] == [0.3 * part for part in (1 / 5, 2 / 5, 3 / 5, 4 / 5)]
    assert rate(config, 4, 100) == 0.3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_first_step_has_lr(schedule):
    assert rate(OptimConfig(lr=0.3, schedule=schedule), 0, 100) == 0.3


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1 / 3, 1.0])
def test_decay_ends_exactly_at_final_when_the_last_step_is_done(schedule, final):
    config = OptimConfig(lr=0.7, schedule=schedule, warmup=3, final=final)
    assert rate(config, 50, 50) == 0.7 * final
    assert rate(config, 51, 50) == 0.7 * final


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_no_step_that_is_taken_has_rate_zero(schedule):
    config = OptimConfig(schedule=schedule, warmup=3)
    assert all(rate(config, step, 20) > 0 for step in range(20))


def test_middle_values_are_the_formulas():
    linear = OptimConfig(lr=1.0, schedule="linear", warmup=10, final=0.2)
    assert rate(linear, 30, 50) == pytest.approx(0.5 + 0.5 * 0.2, rel=1e-15)
    cosine = OptimConfig(lr=1.0, schedule="cosine", warmup=10, final=0.2)
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rate(cosine, 20, 50) == pytest.approx(quarter, rel=1e-15)
    inverse = OptimConfig(lr=1.0, schedule="inverse_sqrt", warmup=8)
    assert rate(inverse, 35, 50) == math.sqrt(9 / 36) == 0.5


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 30),
    total=st.integers(1, 60),
    final=st.floats(0, 1),
)
def test_rates_rise_until_warmup_ends_and_never_after(schedule, warmup, total, final):
    config = OptimConfig(lr=0.3, schedule=schedule, warmup=warmup, final=final)
    rates = [rate(config, step, total) for step in range(max(total, warmup) + 3)]
    assert all(0 < value <= 0.3 for value in rates[:total])
    assert all(a < b for a, b in pairwise(rates[: warmup + 1])) or warmup >= total
    assert all(a >= b - 1e-16 for a, b in pairwise(rates[warmup:]))


def plateau(losses: list[float], **keys: object) -> list[PlateauState]:
    config = OptimConfig(schedule="plateau", **keys)
    states = [PlateauState()]
    for loss in losses:
        states.append(after_evaluation(states[-1], loss, config))
    return states[1:]


def test_plateau_lowers_the_rate_after_patience_evaluations_without_improvement():
    states = plateau([3.0, 2.0, 2.0, 2.5, 2.1, 2.1, 1.0, 5.0], plateau_factor=0.5, plateau_patience=3)
    assert [state.factor for state in states] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    assert [state.num_worse for state in states] == [0, 0, 1, 2, 0, 1, 0, 1]
    assert states[-1].best == 1.0


def test_plateau_counts_only_improvements_above_the_threshold():
    states = plateau([1.0, 0.995, 0.98], plateau_threshold=0.01, plateau_patience=5)
    assert [state.best for state in states] == [1.0, 1.0, 0.98]


def test_a_negative_loss_improves_downwards():
    states = plateau([-1.0, -1.005, -1.02], plateau_threshold=0.01, plateau_patience=5)
    assert [state.best for state in states] == [-1.0, -1.0, -1.02]


def test_nan_is_no_improvement_even_at_first():
    states = plateau([math.nan, math.nan], plateau_patience=2)
    assert states[-1] == PlateauState(best=None, num_worse=0, factor=0.5)


def test_other_schedules_remember_nothing():
    config = OptimConfig(schedule="cosine", plateau_patience=1)
    assert after_evaluation(PlateauState(), 5.0, config) == PlateauState()


def test_plateau_state_survives_json():
    for state in [PlateauState(), *plateau([3.0, 3.0, 3.0, 3.0])]:
        assert PlateauState(**json.loads(json.dumps(asdict(state), allow_nan=False))) == state
