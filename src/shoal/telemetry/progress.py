"""What a person sees while a run goes on, from the metrics that rank 0 puts on the board.

On a terminal that is a live display (``live.py``). Everywhere else it is one ``key=value`` line every few seconds: bars ruin log
files. Displays run inside the supervisor's loop, so they have no thread, never wait, and survive whatever a metric holds.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from shoal.core.units import format_bytes, format_count, format_duration
from shoal.telemetry.statusboard import StatusReading


class Display(Protocol):
    """Where the supervisor shows progress and messages."""

    def update(self, states: Sequence[StatusReading]) -> None:
        """Show what the ranks last said; called several times a second."""

    def message(self, text: str) -> None:
        """Show one or more whole lines, above anything live."""

    def close(self) -> None:
        """Leave the console in order. Closing twice is allowed."""


def describe_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The metrics that people look at, as text, in reading order. What is missing or no number is left out or shown as it is."""
    shown: dict[str, str] = {}
    step, total = number(metrics.get("step")), number(metrics.get("total_steps"))
    if step is not None:
        shown["step"] = f"{step:.0f}/{total:.0f}" if total is not None else f"{step:.0f}"
    for key, name, form in _SHOWN:
        if metrics.get(key) is None:
            continue
        value = number(metrics[key])
        shown[name] = form(value) if value is not None else _no_number(metrics[key])
    return shown


def number(value: Any) -> float | None:
    """The value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def describe_ranks(states: Sequence[StatusReading]) -> str:
    """Where each rank is, for the time before there are metrics."""
    return ", ".join(f"rank {state.rank} {state.phase or 'starting'}" for state in states)


class PlainDisplay:
    """One ``key=value`` line every few seconds, for logs and pipes."""

    def __init__(self, stream: TextIO, *, every: float = 5.0) -> None:
        self._stream = stream
        self._every = every
        self._next = time.monotonic() + every
        self._latest: dict[str, str] = {}
        self._printed: dict[str, str] = {}
        self._is_mute = False

    def update(self, states: Sequence[StatusReading]) -> None:
        """Print a line when it is time for one and something has changed."""
        if states and states[0].metrics:
            self._latest = describe_metrics(states[0].metrics)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._print_latest()

    def message(self, text: str) -> None:
        """Print the lines."""
        self._write(text + "\n")

    def close(self) -> None:
        """Print where the run got to, if that was not said yet."""
        self._print_latest()

    def _print_latest(self) -> None:
        if self._latest and self._latest.get("step") != self._printed.get("step"):
            self._printed = self._latest
            self._write(" ".join(f"{key}={value}" for key, value in self._latest.items()) + "\n")

    def _write(self, text: str) -> None:
        if self._is_mute:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (
            OSError,
            ValueError,
        ):  # the reader went away, or the stream was closed: the run is worth more than its display
            self._is_mute = True


def _no_number(value: Any) -> str:
    return "-".join(str(value).split())[:40] or "?"


_SHOWN = (
    ("epoch", "epoch", lambda value: f"{value:.4g}"),
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("validation_loss", "validation_loss", lambda value: f"{value:.4f}"),
    ("lr", "lr", lambda value: f"{value:.3g}"),
    ("grad_norm", "grad_norm", lambda value: f"{value:.3g}"),
    ("tokens_per_s", "tokens_per_s", format_count),
    ("samples_per_s", "samples_per_s", format_count),
    ("rss_bytes", "memory", lambda value: format_bytes(value).replace(" ", "")),
    ("eta_s", "time_left", format_duration),
)
