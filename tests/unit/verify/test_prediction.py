"""Cost beside its prediction: a comparison of its own, with both numbers and how far they are apart."""

import pytest

from shoal.verify.result import Prediction, judge_prediction


def answer(traffic=None, **measured):
    predicted = {"weights": 1000, "activations": 1000}
    good = {"dp all_reduce": [1, 100]}
    return {
        "traffic": [good, good if traffic is None else traffic],
        "expected_traffic": [good, good],
        "sizes": {"predicted": dict(predicted), "measured": {**predicted, **measured}},
    }


def test_a_prediction_that_holds():
    found = judge_prediction([answer(), answer(activations=1040)])
    assert found.ok is True and found.off == () and found.describe() == "holds"


@pytest.mark.parametrize(
    ("counted", "whats", "word"),
    [
        ({"dp all_reduce": [2, 100]}, ["calls of dp all_reduce"], "a collective is redundant"),
        ({}, ["calls of dp all_reduce", "bytes of dp all_reduce"], "a collective is missing"),
        ({"dp all_reduce": [1, 90]}, ["bytes of dp all_reduce"], "90 counted, 100 predicted (-10%)"),
        (
            {"dp all_reduce": [1, 100], "tp all_gather": [1, 8]},
            ["calls of tp all_gather", "bytes of tp all_gather"],
            "step 2, rank 1",
        ),
    ],
)
def test_traffic_is_compared_to_the_call_and_to_the_byte(counted, whats, word):
    found = judge_prediction([answer(), answer(counted)])
    assert found.ok is False and [one.what for one in found.off] == whats and word in str(found.off[0])


def test_state_agrees_to_the_byte_and_activations_within_a_twentieth():
    assert [one.what for one in judge_prediction([answer(weights=1001)]).off] == ["bytes of weights"]
    (off,) = judge_prediction([answer(activations=1060), answer(activations=1080)]).off
    assert off.as_values() == {
        "what": "bytes of activations",
        "predicted": 1000,
        "counted": 1080,
        "percent": 8.0,
        "where": "rank 1",
    }


def test_the_words_name_the_worst():
    assert judge_prediction([answer(weights=1010, activations=1080)]).describe() == "off by 8%"
    assert judge_prediction([answer(activations=11_000)]).describe() == "off by 1000%"
    assert (
        judge_prediction([answer({"dp all_reduce": [1, 100], "tp all_gather": [1, 8]})]).describe()
        == "off: not foreseen"
    )


def test_what_was_not_predicted_neither_holds_nor_is_off():
    assert Prediction().ok is None and Prediction().as_values() == {"ok": None, "off": [], "missing": {}}


def test_what_was_measured_and_not_predicted_does_not_hold():
    """The activations of a model that looks at its data were `not predicted`, and the prediction held."""
    blind = answer()
    del blind["sizes"]["predicted"]["activations"]
    blind["sizes"]["missing"] = {"activations": "RuntimeError: looks at values"}
    found = judge_prediction([answer(), blind])
    assert found.ok is None and found.off == () and found.describe() == "not predicted"
    assert found.as_values()["missing"] == {"activations": "RuntimeError: looks at values"}
    blind["sizes"]["measured"]["weights"] = 1
    assert judge_prediction([blind]).ok is False, "the rest is still compared"
