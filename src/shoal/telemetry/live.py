"""The live display on a terminal, drawn by rich. Refreshed by the supervisor's loop: rich's own refresh thread is off."""

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.telemetry.progress import Display, PlainDisplay, describe_metrics, describe_ranks, number
from shoal.telemetry.statusboard import StatusReading

_DRAW_EVERY_S = 0.2
_LABELS = {
    "loss": "loss",
    "validation_loss": "validation",
    "lr": "rate",
    "grad_norm": "gradient",
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
