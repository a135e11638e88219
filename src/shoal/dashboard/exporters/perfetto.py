"""A whole run as a Chrome trace, which Perfetto opens: a process for every rank, with its steps and what is known inside of some.

The time of every event is that of one clock: ranks on other hosts are shifted so that their steps end together. A slice has a
thread of its own wherever it would overlap another one, since a viewer draws such slices wrongly. Writing is a stream: a run of
a million steps never is in memory as JSON.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.core.errors import RunError

_MICRO = 1e6
_RUN_PID = 1
"""Of the process that stands for the run as a whole; ranks follow, each with a place for its prediction."""
_THREADS = ("steps", "phase", "cell", "data")
_FIRST_COMM, _SUBLANES = 100, 16


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Something that took time."""

    thread_name: str
    """``steps``, ``phase``, ``cell``, ``data``, or ``comm AXIS``."""
    name: str
    start: float
    """Wall-clock seconds."""
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Count:
    """A value of a curve at a moment."""

    name: str
    at: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Instant:
    """Something that happened."""

    name: str
    at: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Track:
    """A rank, or what was predicted for it, or the run as a whole."""

    kind: Literal["run", "rank", "predicted"]
    rank: int
    label: str
    slices: Iterable[Slice] = ()
    counts: Iterable[Count] = ()
    instants: Iterable[Instant] = ()
    shift: float = 0.0
    """Seconds to add to its times, so that they are those of the first host."""

    @property
    def pid(self) -> int:
        """Of the process that it is in the trace."""
        return _RUN_PID if self.kind == "run" else 2 + 2 * self.rank + (self.kind == "predicted")


def trace_events(tracks: Iterable[Track], begin: float) -> Iterator[dict[str, Any]]:
    """The events of a trace; times are microseconds from ``begin``."""
    for track in tracks:
        pid = track.pid
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": _clean(track.label)}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        zero = begin - track.shift
        yield from _slices(track.slices, pid, zero)
        for count in track.counts:
            if math.isfinite(count.value) and math.isfinite(count.at):
                at = _micros(count.at - zero)
                yield {"ph": "C", "pid": pid, "tid": 0, "name": count.name, "ts": at, "args": {"value": count.value}}
        for instant in track.instants:
            if math.isfinite(instant.at):
                scope = "g" if track.kind == "run" else "p"
                at, details = _micros(instant.at - zero), _plain(instant.details)
                yield {
                    "ph": "i", "pid": pid, "tid": 0, "name": _clean(instant.name), "ts": at, "s": scope, "args": details
                }  # fmt: skip


def _slices(slices: Iterable[Slice], pid: int, zero: float) -> Iterator[dict[str, Any]]:
    """Slices by their start in each thread, so that what is free is known by one number."""
    ends: dict[str, list[float]] = {}
    threads: dict[tuple[str, int], int] = {}
    for one in slices:
        if not (math.isfinite(one.start) and math.isfinite(one.seconds) and one.seconds >= 0):
            continue
        start, end = _micros(one.start - zero), _micros(one.start + one.seconds - zero)
        lanes = ends.setdefault(one.thread_name, [])
        place = next((place for place, until in enumerate(lanes) if until <= start), len(lanes))
        if place == _SUBLANES:
            continue
        lanes[place:] = [end, *lanes[place + 1 :]]
        if (one.thread_name, place) not in threads:
            tid = threads[one.thread_name, place] = _thread(one.thread_name, place, threads)
            name = one.thread_name if place == 0 else f"{one.thread_name} ({place + 1})"
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": _clean(name)}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        tid = threads[one.thread_name, place]
        shown = {"name": _clean(one.name), "cat": _clean(one.thread_name), "ts": start, "dur": round(end - start, 3)}
        yield {"ph": "X", "pid": pid, "tid": tid, **shown, "args": _plain(one.details)}


def _thread(thread_name: str, place: int, threads: Mapping[tuple[str, int], int]) -> int:
    if thread_name in _THREADS:
        return 1 + _THREADS.index(thread_name) * _SUBLANES + place
    known = {name for name, _ in threads if name not in _THREADS}
    number = len(known - {thread_name})
    first = next(
        (tid - at for (name, at), tid in threads.items() if name == thread_name), _FIRST_COMM + number * _SUBLANES
    )
    return first + place


def _micros(seconds: float) -> float:
    return round(seconds * _MICRO, 3)


def _clean(text: str) -> str:
    """Names out of files: at most so long, and nothing that is no text."""
    return text[:200].encode("utf-8", "replace").decode("utf-8")


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    """Details as JSON has them."""
    found: dict[str, Any] = {}
    for key, value in details.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[key] = str(value)
        elif isinstance(value, bool | int | float) or value is None:
            found[key] = value
        else:
            found[key] = _clean(str(value))
    return found


def write_trace(path: Path, tracks: Sequence[Track], begin: float, about: Mapping[str, str]) -> int:
    """Write a trace, and say how many events are in it.

    Raises:
        RunError: the disk refused.
    """
    written = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            head = {key: _clean(value) for key, value in about.items()}
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(head)}, "traceEvents": [\n')
            for event in trace_events(tracks, begin):
                file.write((",\n" if written else "") + json.dumps(event, allow_nan=False))
                written += 1
            file.write("\n]}\n")
    except OSError as error:
        raise RunError(f"cannot write the trace {path}: {error.strerror}; name another file") from error
    return written


def shifts(ends: Mapping[int, Mapping[int, float]], hosts: Mapping[int, str]) -> dict[int, float]:
    """What to add to every rank's times: the clocks of hosts differ, and a step ends for all ranks at about the same moment.

    Args:
        ends: by rank, the end of each step by the clock of its host.
        hosts: by rank; ranks of a host have one clock.

    Returns:
        By rank; ranks of the first host, and of hosts that share no step with it, have 0.
    """
    if not ends:
        return {}
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ends):
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    reference, *others = by_host.values()
    means = {tuple(ranks): _mean_ends(ranks, ends) for ranks in by_host.values()}
    found = dict.fromkeys(ends, 0.0)
    for ranks in others:
        mine, theirs = means[tuple(ranks)], means[tuple(reference)]
        differences = sorted(theirs[step] - mine[step] for step in mine.keys() & theirs.keys())
        if differences:
            found.update(dict.fromkeys(ranks, differences[len(differences) // 2]))
    return found


def _mean_ends(ranks: Sequence[int], ends: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    steps = set.intersection(*(set(ends[rank]) for rank in ranks))
    return {step: sum(ends[rank][step] for rank in ranks) / len(ranks) for step in steps}
