"""Scores against tables that were worked out by hand."""

import pytest

from shoal.planner.tables.predict import Predicted
from shoal.planner.tables.score import score, score_by_source, short_names


def row(number: int, measured, predicted, *, metric="iter_time_s", group=("g",), source="s", **rest) -> Predicted:
    return Predicted(
        row=number, line=number + 2, source=source, metric=metric, measured=measured, predicted=predicted, group=group,
        **{"in_range": True, **rest},
    )  # fmt: skip


def test_errors_by_hand():
    rows = [row(at, 10.0, 10.0 + error) for at, error in enumerate([1, -1, 2, -2, 0, 0, 0, 0, 0, 4])]
    found = score(rows)
    assert found.mape == pytest.approx(0.1) and found.bias == pytest.approx(0.04)
    assert found.p90 == pytest.approx(0.4), "nine of ten are below it"
    assert (found.count, found.unpredicted, found.out_of_range) == (10, 0, 0)


def test_rows_without_a_prediction_and_out_of_range_are_counted():
    found = score([row(0, 1.0, 2.0, in_range=False), row(1, 1.0, None), row(2, None, None, in_range=False)])
    assert (found.count, found.unpredicted, found.out_of_range) == (1, 2, 1) and found.mape == 1.0


def test_order_and_choice_by_hand():
    """Measured 1 2 3 4, predicted 1 3 2 4: five of six pairs agree, and the pick is the best."""
    rows = [row(at, measured, predicted) for at, (measured, predicted) in enumerate([(1, 1), (2, 3), (3, 2), (4, 4)])]
    found = score(rows)
    assert found.kendall_tau == pytest.approx((5 - 1) / 6) and found.regret == 0


def test_regret_is_what_the_pick_costs():
    found = score([row(0, 10.0, 3.0), row(1, 8.0, 4.0), row(2, 9.0, 5.0)])
    assert found.regret == pytest.approx(10 / 8 - 1)
    per_second = [
        row(at, value, guess, metric="tokens_per_s") for at, (value, guess) in enumerate([(100, 9), (80, 10)])
    ]
    assert score(per_second).regret == pytest.approx(100 / 80 - 1) and score(per_second).kendall_tau == -1


def test_what_was_run_several_times_is_one_choice_with_its_mean():
    # Nobody can pick the better of two measurements of one plan.
    twice = [row(0, 12.0, 9.0, choice="a"), row(1, 10.0, 9.0, choice="a")]
    assert score(twice).regret is None and score(twice).kendall_tau is None
    other = row(2, 10.0, 9.5, choice="b")
    assert score([*twice, other]).regret == pytest.approx(0.1)


def test_groups_and_metrics_are_judged_by_themselves():
    first = [row(0, 1.0, 1.0, group=("a",)), row(1, 2.0, 2.0, group=("a",))]
    second = [row(2, 1.0, 2.0, group=("b",)), row(3, 2.0, 1.0, group=("b",))]
    lone = [row(4, 5.0, 0.1, group=("c",)), row(5, 5.0, 0.1, group=("a",), metric="peak_mem_gib")]
    found = score([*first, *second, *lone])
    assert found.kendall_tau == 0 and found.regret == pytest.approx(0.5)
    assert score(lone).kendall_tau is None and score(lone).regret is None


def test_ties_that_were_measured_say_nothing_and_ties_that_were_predicted_are_no_order():
    assert score([row(0, 1.0, 1.0), row(1, 1.0, 2.0)]).kendall_tau is None
    assert score([row(0, 1.0, 1.0), row(1, 2.0, 1.0)]).kendall_tau == 0


def test_running_out_of_memory_by_hand():
    """Three ran out, two of them foretold; a run that was timed is said to run out."""
    rows = [
        row(0, 1.0, 1.0, metric="oom", runs_out=True),
        row(1, 1.0, 1.0, metric="oom", runs_out=True),
        row(2, 1.0, 0.0, metric="oom", runs_out=False),
        row(3, 0.0, 0.0, metric="oom", runs_out=False),
        row(4, 3.0, 3.0, runs_out=True),
        row(5, 3.0, 3.0, runs_out=False),
    ]
    found = score(rows)
    assert found.oom_precision == pytest.approx(2 / 3) and found.oom_recall == pytest.approx(2 / 3)
    assert found.mape == 0, "a yes and a no have no percentage"
    assert score(rows[5:]).oom_precision is None and score(rows[5:]).oom_recall is None


def test_sources_are_in_the_order_of_the_table():
    found = score_by_source([row(0, 1.0, 2.0, source="b"), row(1, 1.0, 1.0, source="a"), row(2, 1.0, 4.0, source="b")])
    assert list(found) == ["b", "a"] and found["b"].mape == 2.0 and found["a"].mape == 0.0
    assert found["b"].as_dict()["count"] == 2


def test_names_are_shortened_and_stay_apart():
    """Releases of one document were printed as one name, because the release stands at its end."""
    names = [
        f"NVIDIA Megatron-Bridge performance summary, {release} NeMo Container [docs]" for release in ("26.04", "26.06")
    ]
    found = short_names([*names, "vTrain [data]"])
    assert len(set(found.values())) == 3 and found["vTrain [data]"] == "vTrain"
    assert all(len(name) <= 48 for name in found.values()) and "26.04 NeMo" in found[names[0]]
    alike = [f"{'x' * 30}{number}{'y' * 30}" for number in (1, 2)]
    assert len(set(short_names(alike).values())) == 2
