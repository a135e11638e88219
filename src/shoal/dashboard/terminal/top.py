"""``shoal top``: the picture of a run again and again, until the run is over."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from rich.console import Console
from rich.live import Live

from shoal.dashboard.terminal.drawing import draw, plain, plain_lines
from shoal.dashboard.terminal.picture import Picture


def watch(take: Callable[[], Picture], *, every: float, once: bool, stream: TextIO | None = None) -> Picture:
    """Show pictures until the run is over, or one; the last one.

    A terminal gets one drawing that changes; everything else gets lines, and only when something has changed.

    Args:
        take: looks at the run and makes a picture.
        every: seconds between pictures.
        once: show one and stop.
        stream: stdout where it is left out.
    """
    out = stream if stream is not None else sys.stdout
    # A terminal that cannot move its cursor would show one drawing below the other.
    if out.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return _draw_on(Console(file=out), take, every=every, once=once)
    shown: list[str] = []
    told: tuple[str, ...] = ()
    while True:
        picture = take()
        # A line of the story is said once.
        fresh = tuple(line for line in picture.story if line not in told)
        lines, told = plain_lines(replace(picture, story=())), picture.story
        if lines != shown or fresh:
            out.write("".join(f"{line}\n" for line in [*lines, *(f"  story: {plain(line)}" for line in fresh)]))
            out.flush()
        shown = lines
        if once or picture.is_over:
            return picture
        time.sleep(every)


def _draw_on(console: Console, take: Callable[[], Picture], *, every: float, once: bool) -> Picture:
    if once:
        picture = take()
        console.print(draw(picture, width=console.width, height=max(console.height, 12)))
        return picture
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            picture = take()
            live.update(draw(picture, width=console.width, height=max(console.height - 1, 12)), refresh=True)
            if picture.is_over:
                return picture
            time.sleep(every)
