"""The names of pipeline schedules and what a plan must know of each: plain words, because ``core`` imports no other room.

What a schedule does is in ``schedules/``; a test compares the two.
"""

from dataclasses import dataclass, replace

DEFAULT_SCHEDULE = "1f1b"
COMBINED = (DEFAULT_SCHEDULE, "zb-h1", "pipedream")
"""Proved with every other technique: one for each kind of backward pass, whole, in two parts, and by version."""


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """What a plan asks of a schedule."""

    chunks: int = 1
    """Stages per rank when the plan does not say."""
    takes_chunks: bool = False
    """The plan may say."""
    is_asynchronous: bool = False
    """Weights change before the pipeline is empty, so it does not compute what one process does."""
    updates_each: bool = False
    """Every microbatch is an update, so a step has as many as it has microbatches."""
    is_bidirectional: bool = False
    """Two ranks hold each stage, and microbatches run through both ways."""


SCHEDULES: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts(),
    "1f1b": ScheduleFacts(),
    "interleaved": ScheduleFacts(chunks=2, takes_chunks=True),
    "looped-bfs": ScheduleFacts(chunks=2, takes_chunks=True),
    "zb-h1": ScheduleFacts(),
    "zb-h2": ScheduleFacts(),
    "zbv": ScheduleFacts(chunks=2),
    "v-half": ScheduleFacts(chunks=2),
    "v-min": ScheduleFacts(chunks=2),
    "chimera": ScheduleFacts(is_bidirectional=True),
    "dualpipe": ScheduleFacts(is_bidirectional=True),
    "dualpipev": ScheduleFacts(chunks=2),
    "pipedream": ScheduleFacts(is_asynchronous=True, updates_each=True),
    "pipedream-vsync": ScheduleFacts(is_asynchronous=True, updates_each=True),
    "pipedream-2bw": ScheduleFacts(is_asynchronous=True),
    "pipedream-flush": ScheduleFacts(),
}


def is_file(schedule: str) -> bool:
    """True for a schedule that is read from a CSV file."""
    return schedule.endswith(".csv")


def schedule_facts(schedule: str | None, chunks: int | None = None) -> ScheduleFacts:
    """The facts of a schedule by name; of a file, whose stages per rank it says itself, those of a plain one."""
    found = SCHEDULES.get(schedule or DEFAULT_SCHEDULE, ScheduleFacts(takes_chunks=True))
    return found if chunks is None else replace(found, chunks=chunks)
