"""The names of pipeline schedules and what a plan must know of each: plain words, because ``core`` imports no other room.

What a schedule does is in ``schedules/``; a test compares the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.core.errors import RequestError

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
    takes_replicas: bool = False
    """The plan may give a stage several ranks, which take turns at the microbatches."""


SCHEDULES: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts(takes_replicas=True),
    "1f1b": ScheduleFacts(takes_replicas=True),
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
    "pipedream-flush": ScheduleFacts(takes_replicas=True),
}


def is_file(schedule: str) -> bool:
    """True for a schedule that is read from a CSV file."""
    return schedule.endswith(".csv")


def schedule_facts(schedule: str | None, chunks: int | None = None) -> ScheduleFacts:
    """The facts of a schedule by name; of a file, whose stages per rank it says itself, those of a plain one."""
    found = SCHEDULES.get(schedule or DEFAULT_SCHEDULE, ScheduleFacts(takes_chunks=True, takes_replicas=True))
    return found if chunks is None else replace(found, chunks=chunks)


def is_row(text: str) -> bool:
    """True for ``replicas`` that can be read: numbers with a dash between them."""
    return all(word.isascii() and word.isdecimal() for word in text.split("-"))


def unreadable_replicas(text: str) -> str:
    """What is wrong with ``replicas`` that cannot be read."""
    return f"replicas={text} is no row of numbers; write the pipeline ranks of every stage, such as replicas=2-1"


def parse_replicas(text: str) -> tuple[int, ...]:
    """The ranks of every stage, from ``2-1``: two for the first and one for the second.

    Raises:
        RequestError: it is something else.
    """
    if not is_row(text):
        raise RequestError(unreadable_replicas(text))
    return tuple(map(int, text.split("-")))


def write_replicas(replicas: Sequence[int]) -> str:
    """The reverse of ``parse_replicas``."""
    return "-".join(map(str, replicas))


def replica_problems(replicas: Sequence[int], num_ranks: int) -> Iterator[str]:
    """Why a pipeline cannot have so many ranks for each stage, each with both numbers and the fix."""
    text = f"replicas={write_replicas(replicas)}"
    if min(replicas) < 1:
        yield f"{text} leaves a stage without a rank; give every stage 1 or more"
    elif sum(replicas) != num_ranks:
        yield f"{text} are {sum(replicas)} ranks, and pp is {num_ranks}; set pp to {sum(replicas)}, or change replicas"
    elif len(replicas) == 1:
        yield f"{text} is one stage on {num_ranks} ranks, which is no pipeline; write dp={num_ranks} in their place"
    elif max(replicas) == 1:
        yield f"{text} gives every stage one rank, as every pipeline has it; leave replicas out"
