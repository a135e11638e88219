"""The live display: drawn without a thread, messages above it untouched, and no metric so odd that it stops the run."""

import io
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.telemetry.display import LiveDisplay, PlainDisplay, build_display, render
from shoal.telemetry.statusboard import StatusReading

METRICS = {
    "step": 12,
    "total_steps": 300,
    "loss": 2.5,
    "lr": 1e-3,
    "grad_norm": 1.5,
    "tokens_per_s": 1e4,
    "rss_bytes": 1 << 30,
    "eta_s": 75,
}


def terminal() -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, force_terminal=True, width=120, color_system=None)


def draw(metrics: dict[str, Any]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(render([StatusReading(rank=0, metrics=metrics)]))
    return stream.getvalue()


def test_picture() -> None:
    text = draw(METRICS)
    for words in (
        "step 12/300",
        "loss 2.5000",
        "rate 0.001",
        "gradient 1.5",
        "tokens/s 10k",
        "memory 1.0GiB",
        "1:15 left",
    ):
        assert words in text
    assert "starting: rank 0 starting" in draw({})


ODD_ON_TERMINAL = [
    None,
    True,
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    0,
    1e308,
    10**400,
    "",
    "a b",
    "é\n",
    [],
    {"a": 1},
]
odd = st.sampled_from(ODD_ON_TERMINAL) | st.integers() | st.floats()


@pytest.mark.parametrize("key", METRICS)
def test_each_metric_may_be_odd_on_a_terminal(key: str) -> None:
    for value in ODD_ON_TERMINAL:
        assert "step" in draw({**METRICS, key: value})


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(METRICS, odd)))
def test_any_metrics_can_be_drawn(metrics: dict[str, Any]) -> None:
    draw(metrics)


def test_messages_are_shown_as_they_are_and_no_thread_is_made() -> None:
    stream, console = terminal()
    display = LiveDisplay(console)
    threads = threading.active_count()
    display.update([StatusReading(rank=0, metrics=METRICS)])
    display.message("[rank 1] [bold]no markup[/bold] " + "w" * 200)
    assert threading.active_count() == threads
    display.close()
    display.close()
    assert "[rank 1] [bold]no markup[/bold] " + "w" * 200 + "\n" in stream.getvalue()
    assert "step 12/300" in stream.getvalue()


def test_terminal_that_goes_away_does_not_stop_the_run() -> None:
    stream, console = terminal()
    display = LiveDisplay(console)
    display.update([StatusReading(rank=0, metrics=METRICS)])
    stream.close()
    display.message("x")
    display._drawn = 0.0
    display.update([StatusReading(rank=0, metrics=METRICS)])
    display.close()


def test_no_bar_where_there_is_no_terminal() -> None:
    assert isinstance(build_display(io.StringIO(), every=1.0), PlainDisplay)
