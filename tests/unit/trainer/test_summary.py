"""A forecast beside its run: kept, found again by a run that goes on, compared number by number, told."""

import json
import math

from shoal.telemetry.summaryfile import read_summary, write_summary
from shoal.trainer.summary import Ended, compare, describe_forecast, keep_forecast, with_forecast


def page(**changes):
    state = {"weights": 100, "gradients": 100, "optimizer": 200}
    ranks = [{"state_bytes": state, "traffic": {"dp all_reduce": [2, 400]}, "peak_bytes": 1400}] * 2
    values = {"plan": "dp=2", "seconds": 0.11, "bubble": None, "machine": "m", "ranks": ranks}
    return {**values, **changes}


def measured(**changes):
    return {"seconds": 0.1, "bubble": None, "num_steps": 10, "ranks": page()["ranks"], **changes}


def test_equal_numbers_are_said_to_be_equal():
    found = compare(page(), measured(), [1500, 1600])
    assert abs(found["step_seconds"]["error"] - 0.1) < 1e-9
    assert found["traffic_is_equal"] and found["state_is_equal"]
    assert found["step_bytes"] == {"predicted": 800, "measured": 800, "error": 0.0}
    assert found["ranks"][1]["peak_bytes"] == {"predicted": 1400, "measured": 1600, "error": 1400 / 1600 - 1}
    lines = describe_forecast({"forecast": found})
    assert any("+10.0%" in line for line in lines) and any("every call and byte equal" in line for line in lines)
    assert lines[-1].split(maxsplit=3)[-1] == "predicted 1.4 KiB, 1.4 KiB; measured 1.5 KiB, 1.6 KiB", "told apart"
    assert "110.0 ms predicted, 100.0 ms measured" in lines[1]


def test_one_call_more_is_seen():
    other = [page()["ranks"][0], {**page()["ranks"][0], "traffic": {"dp all_reduce": [3, 400]}}]
    found = compare(page(), measured(ranks=other), [])
    assert not found["traffic_is_equal"] and found["state_is_equal"]
    assert any("NOT equal" in line for line in describe_forecast({"forecast": found}))


def test_a_forecast_is_found_again_only_by_the_run_that_goes_on(tmp_path):
    assert keep_forecast(tmp_path, None, resume=False) is None
    assert keep_forecast(tmp_path, page(), resume=False) == page()
    assert keep_forecast(tmp_path, None, resume=True) == page()
    assert keep_forecast(tmp_path, None, resume=False) is None
    assert not (tmp_path / "forecast.json").exists()


def test_the_summary_gets_both(tmp_path):
    ended = Ended(exit_code=0, summary={"forecast": {"measured": measured()}, "peak_rss_bytes": [1, 2]})
    found = with_forecast(ended, page(), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["forecast"]["plan"] == "dp=2"
    assert found.summary["forecast"]["step_seconds"]["measured"] == 0.1


def test_a_run_that_was_too_short_is_left_as_it_was(tmp_path):
    ended = Ended(exit_code=0, summary={"forecast": {"measured": measured(num_steps=2)}})
    assert with_forecast(ended, page(), tmp_path) is ended
    assert describe_forecast({}) == []


def test_a_metric_that_is_no_number_does_not_keep_the_summary_from_being_written(tmp_path):
    write_summary(tmp_path, {"status": "completed", "steps": 1, "validation_metrics": {"perplexity": math.inf}})
    assert read_summary(tmp_path)["validation_metrics"] == {"perplexity": None}
