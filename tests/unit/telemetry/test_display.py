"""Plain progress: lines at their interval, and no metric so odd that it stops the run."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.telemetry.display import PlainDisplay, describe_metrics, describe_ranks
from shoal.telemetry.statusboard import StatusReading

USUAL = {
    "step": 12,
    "total_steps": 300,
    "epoch": 0.25,
    "loss": 2.34567,
    "lr": 1e-3,
    "grad_norm": 1.5,
    "tokens_per_s": 12345.6,
    "rss_bytes": 3 << 30,
    "eta_s": 75,
    "validation_loss": 2.0,
}


def state(metrics: dict[str, Any]) -> list[StatusReading]:
    return [StatusReading(rank=0, phase="forward", metrics=metrics), StatusReading(rank=1)]


def test_usual_line() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, every=1e-9)
    display.update(state(USUAL))
    assert stream.getvalue() == (
        "step=12/300 epoch=0.25 loss=2.3457 validation_loss=2.0000 lr=0.001 grad_norm=1.5 "
        "tokens_per_s=12.3k memory=3.0GiB time_left=1:15\n"
    )


def test_lines_keep_their_interval_and_the_last_step_is_always_said() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, every=1000.0)
    for step in range(50):
        display.update(state({**USUAL, "step": step}))
    assert stream.getvalue() == ""
    display.close()
    display.close()
    assert stream.getvalue().count("\n") == 1
    assert "step=49/300" in stream.getvalue()


def test_nothing_new_prints_nothing() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, every=1e-9)
    for _ in range(5):
        display.update(state(USUAL))
    display.update(state({}))
    display.update([])
    assert stream.getvalue().count("\n") == 1


def test_odd_metrics() -> None:
    shown = describe_metrics(
        {"step": 3, "loss": float("nan"), "lr": float("inf"), "grad_norm": "a b", "eta_s": None, "rss_bytes": []}
    )
    assert shown == {"step": "3", "loss": "nan", "lr": "inf", "grad_norm": "a-b", "memory": "[]"}
    assert describe_metrics({}) == {}
    assert describe_metrics({"loss": 1.0}) == {"loss": "1.0000"}


ODD = [None, True, float("nan"), float("inf"), float("-inf"), -1, 0, 1e308, 10**400, "", "a b", "é\n", [], {"a": 1}]
odd = st.sampled_from(ODD) | st.integers() | st.floats()


@pytest.mark.parametrize("key", USUAL)
def test_each_metric_may_be_odd(key: str) -> None:
    for value in ODD:
        shown = describe_metrics({**USUAL, key: value})
        assert all(text and not text.isspace() and "\n" not in text for text in shown.values())


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(USUAL, odd)))
def test_any_metrics_make_one_line_of_words(metrics: dict[str, Any]) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, every=1e-9)
    display.update(state(metrics))
    for word in stream.getvalue().split():
        assert "=" in word


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("reader is gone")


@pytest.mark.parametrize("stream", [Broken(), None])
def test_reader_that_goes_away_does_not_stop_the_run(stream: io.StringIO | None) -> None:
    if stream is None:
        stream = io.StringIO()
        stream.close()
    display = PlainDisplay(stream, every=1e-9)
    display.message("x")
    display.update(state(USUAL))
    display.close()


def test_ranks_before_the_first_metrics() -> None:
    assert describe_ranks(state({})) == "rank 0 forward, rank 1 starting"
