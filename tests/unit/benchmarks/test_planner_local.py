"""What is made of rounds on a machine that drifts: told times, no process."""

import importlib
import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "planner_local"
TRUE = {"dp=2": 1.0, "tp=2": 1.1, "pp=2": 1.5}
ERROR = {"dp=2": 1.0, "tp=2": 0.8, "pp=2": 1.1}


@pytest.fixture
def judging(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("judging")
    del sys.modules["judging"]


def rounds_of(judging, drift, *, control=1.0):
    return [
        {
            plan: judging.Pair(predicted=seconds * ERROR[plan] * level, measured=seconds * level)
            for plan, seconds in TRUE.items()
        }
        | {judging.CONTROL: judging.Pair(predicted=level, measured=control * level)}
        for level in drift
    ]


def test_drift_between_rounds_is_in_no_number_but_its_own(judging):
    quiet = judging.judge(rounds_of(judging, [1.0, 1.0, 1.0]), fixed="dp=2", picks=["tp=2"])
    rough = judging.judge(rounds_of(judging, [1.0, 1.5, 0.9]), fixed="dp=2", picks=["tp=2"])
    assert rough["mean_absolute_error"] == pytest.approx(quiet["mean_absolute_error"]) == pytest.approx(0.1)
    assert rough["picks"][0]["regret"] == pytest.approx(0.1)
    assert rough["picks"][0]["regret_across_rounds"] == pytest.approx(0.1)
    assert rough["fastest"] == "dp=2" and rough["best_predicted"] == "tp=2"
    assert rough["noise"]["drift_of_the_machine"] == pytest.approx(1.5 / 0.9 - 1)
    assert rough["noise"]["measured_over_rounds"] == pytest.approx(0)


def test_a_plan_that_is_not_the_same_twice_is_the_noise(judging):
    found = judging.judge(rounds_of(judging, [1.0, 2.0], control=1.25), fixed="dp=2", picks=["dp=2"])
    assert found["noise"]["measured_in_a_round"] == found["noise"]["measured_over_rounds"] == pytest.approx(0.2)
    assert found["noise"]["predicted_in_a_round"] == 0
    assert found["picks"][0]["regret"] == 0


def test_the_luck_of_the_fastest_is_not_regret(judging):
    # Two equal plans, each lucky in another half of the rounds.
    rounds = [{"a": 0.8, "b": 1.0, "c": 1.0, "control": 1.0}, {"a": 1.0, "b": 0.8, "c": 1.0, "control": 1.0}]
    assert judging.across(rounds, "c")["regret_across_rounds"] == pytest.approx(0.0)
    assert judging.across(rounds[:1], "c") == {"regret_across_rounds": None}


def test_kendall_counts_pairs(judging):
    assert judging.kendall([1, 2, 3], [10, 20, 30]) == 1.0
    assert judging.kendall([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)


def test_finals_find_the_regret_below_the_noise_of_a_round(judging):
    """Each turn is up to a fifth off; over forty rounds 3 and 10% are told apart."""
    noise = random.Random(3)
    rounds = [
        {plan: seconds * level * noise.uniform(0.8, 1.2) for plan, seconds in
         {"a": 1.0, "b": 1.03, "c": 1.1, judging.CONTROL: 1.0}.items()}
        for level in (1.0, 1.5) * 20
    ]  # fmt: skip
    found = judging.judge_finals(rounds, fixed="a", picks=["b", "c", "b"])
    assert found["num_rounds"] == 40 and [pick["plan"] for pick in found["picks"]] == ["b", "c"]
    assert found["same_plan_in_a_round"] > 0.08 and found["same_plan_over_rounds"] < 0.05
    for pick, true in zip(found["picks"], (0.03, 0.1), strict=True):
        low, high = pick["interval"]
        assert low <= true <= high and abs(pick["regret"] - true) < 0.05


def test_finalists_are_the_fastest_and_the_picks_each_once(judging):
    rows = [{"plan": plan} for plan in "abcd"]
    assert judging.finalists(rows, ["d", "b"], 2) == ["a", "b", "d"]
