"""What a person sees while a run goes on, from the metrics that rank 0 puts on the status board.

On a terminal that is a live display, drawn by rich. Everywhere else it is one ``key=value`` line every few seconds: bars ruin
log files. Displays run inside the supervisor's loop (rich's own refresh thread is off), so they have no thread, never wait, and
survive whatever a metric holds.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
    ("noise_scale", "noise_scale", lambda value: f"{value:.3g}"),
    ("distance", "island_distance", lambda value: f"{value:.3g}"),
    ("tokens_per_s", "tokens_per_s", format_count),
    ("samples_per_s", "samples_per_s", format_count),
    ("rss_bytes", "memory", lambda value: format_bytes(value).replace(" ", "")),
    ("eta_s", "time_left", format_duration),
)


_DRAW_EVERY_S = 0.2
_LABELS = {
    "loss": "loss",
    "validation_loss": "validation",
    "lr": "rate",
    "grad_norm": "gradient",
    "noise_scale": "noise scale",
    "island_distance": "islands apart",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "memory": "memory",
    "epoch": "epoch",
}


def build_display(stream: TextIO, *, every: float) -> Display:
    """The display that suits where it goes: live on a terminal, plain lines elsewhere."""
    if stream.isatty():
        return LiveDisplay(Console(file=stream))
    return PlainDisplay(stream, every=every)


class LiveDisplay:
    """A bar and a line of numbers that stay at the bottom while messages scroll above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._drawn = 0.0
        self._states: Sequence[StatusReading] = ()
        self._is_open = False
        self._is_mute = False

    def update(self, states: Sequence[StatusReading]) -> None:
        """Draw again, at most five times a second."""
        self._states = states
        if time.monotonic() - self._drawn >= _DRAW_EVERY_S:
            self._draw()

    def message(self, text: str) -> None:
        """Print lines above the display, as they are: rank output is no markup."""
        if self._is_mute:
            return
        try:
            self._console.print(Text(text), soft_wrap=True, highlight=False)
        except (OSError, ValueError):
            self._is_mute = True

    def close(self) -> None:
        """Draw the last state and let go of the terminal."""
        if self._is_open:
            self._draw()
            self._is_open = False
            try:
                self._live.stop()
            except (OSError, ValueError):
                self._is_mute = True

    def _draw(self) -> None:
        if self._is_mute:
            return
        self._drawn = time.monotonic()
        try:
            if not self._is_open:
                self._live.start()
                self._is_open = True
            self._live.update(render(self._states), refresh=True)
        except (OSError, ValueError):  # the terminal went away
            self._is_mute = True


def render(states: Sequence[StatusReading]) -> Group:
    """The picture of these states: where the run is, and its numbers."""
    metrics = states[0].metrics if states else {}
    if not metrics:
        return Group(Text(f"starting: {describe_ranks(states)}", style="dim", no_wrap=True, overflow="ellipsis"))
    shown = describe_metrics(metrics)
    head = Table.grid(padding=(0, 1))
    step, total = number(metrics.get("step")), number(metrics.get("total_steps"))
    row = [Text(f"step {shown.get('step', '?')}", style="bold")]
    bar = None
    if step is not None and total is not None and total > 0:
        bar = ProgressBar(total=total, completed=min(max(step, 0.0), total), width=40)
    left = shown.get("time_left")
    head.add_row(
        *row, *([bar] if bar is not None else []), Text(f"{left} left" if left is not None else "", style="cyan")
    )
    line = Text(no_wrap=True, overflow="ellipsis")
    for key, label in _LABELS.items():
        if key in shown:
            line.append(f"{label} ", style="dim")
            line.append(f"{shown[key]}   ")
    return Group(head, line)
