"""From measurements to a machine, and from past runs to better constants: pure functions over numbers. No torch.

What measures is ``tuning/calibration.py``.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import RequestError
from shoal.planner.hardware.machine import (
    CollectiveTime,
    CopyTime,
    CoreSharing,
    Fit,
    Machine,
    MatmulTime,
    Meeting,
    Provenance,
)

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Bytes of the collectives that are timed."""
MEETING_SIZES = (4 << 10, 1 << 20)
"""Bytes of the operations that are timed between ranks that compute."""
_MOST_FACTOR = 5.0
SHAPES = ((64, 64, 256), (512, 128, 512), (1024, 512, 1024))
"""Matrix products that are timed: rows, inner, outer."""
_PRIOR = 0.05
"""Weight of the constants as they were measured, against one run whose measured step is one."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the processes of one size measured: one answer per rank."""

    processes: int
    threads: int
    answers: Sequence[Mapping[str, Any]]


def build_machine(found: Iterable[Measured], provenance: Provenance, *, memory_bytes: int = 0) -> Machine:
    """Put measurements together. Of an operation that all ranks do together the slowest rank's time counts.

    Args:
        found: what was measured, by number of processes.
        provenance: when and where.
        memory_bytes: that all processes together can take; 0 where nobody looked.
    """
    matmuls, copies, sharing, collectives, meetings = [], [], [], [], []
    groups = list(found)
    # Of the largest group: a process alone is not forked, and has a little more.
    largest = max(groups, key=lambda group: group.processes)
    rank_bytes = max(int(answer["rank_bytes"]) for answer in largest.answers)
    for group in groups:
        first = group.answers[0]
        for number, (rows, inner, outer) in enumerate(SHAPES):
            seconds = _best_window([answer["matmuls"][number] for answer in group.answers], group, provenance.cores)
            shape = {"rows": rows, "inner": inner, "outer": outer}
            matmuls.append(MatmulTime(processes=group.processes, threads=group.threads, seconds=seconds, **shape))
        seconds = _best_window([answer["copy"]["windows"] for answer in group.answers], group, provenance.cores)
        copies.append(CopyTime(processes=group.processes, num_bytes=first["copy"]["num_bytes"], seconds=seconds))
        turns = [
            max(answer["together"][turn] for answer in group.answers) / alone
            for turn, alone in enumerate(first["alone"])
        ]
        # Other processes never make a process faster; where it seems to, something else ran while the first was alone.
        slow_down = max(1.0, _median(turns))
        sharing.append(CoreSharing(processes=group.processes, threads=group.threads, slow_down=slow_down))
        for number, timed in enumerate(first["collectives"]):
            seconds = max(answer["collectives"][number]["seconds"] for answer in group.answers)
            collectives.append(CollectiveTime(**{**timed, "processes": group.processes, "seconds": seconds}))
        meetings += [build_meeting(group.processes, timed) for timed in first["meetings"]]
    return Machine(
        provenance=provenance,
        matmuls=matmuls,
        copies=copies,
        sharing=sharing,
        collectives=collectives,
        meetings=meetings,
        rank_bytes=rank_bytes,
        memory_bytes=memory_bytes,
    )


def _best_window(ranks: Sequence[Sequence[Mapping[str, float]]], group: Measured, cores: int) -> float:
    """Seconds of one call, from what every rank had in each of several windows: the best window, for others only make it worse.

    With a core for every thread it is the best call of the typical rank. Where processes share cores it is what all of them
    got done together in a window, shared out evenly: some may have had more of the cores than others.
    """
    if group.processes * group.threads <= cores:
        return _median(min(window["best"] for window in windows) for windows in ranks)
    by_window = zip(*([window["mean"] for window in windows] for windows in ranks), strict=True)
    return float(min(statistics.harmonic_mean(means) for means in by_window))


def build_meeting(processes: int, timed: Mapping[str, Any]) -> Meeting:
    """Two constants from the times of a small and of a large operation, each alone and between ranks that compute.

    Args:
        processes: of the group.
        timed: ``operation``, ``ranks``, and by size ``alone`` and ``between``: seconds of an operation in a row of them, and
            seconds that it adds to ranks that compute.
    """
    (small, large), (small_between, large_between) = timed["alone"], timed["between"]
    grown, grown_between = large - small, large_between - small_between
    factor = min(_MOST_FACTOR, max(1.0, grown_between / grown)) if grown > 0 else 1.0
    seconds = max(0.0, small_between - factor * small)
    return Meeting(
        operation=timed["operation"], ranks=timed["ranks"], processes=processes, seconds=seconds, factor=factor
    )


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that was measured, beside what the machine's constants say of it without any fit."""

    name: str
    compute: float
    communication: float
    measured: float
    """Median seconds of its steps."""


def fit_runs(runs: Sequence[PastRun]) -> Fit:
    """The three constants that make past runs come out best, in relative error; few runs leave them near what was measured.

    A least-squares fit of ``compute * c + communication * m + f`` over measured time, with a weak pull towards 1, 1 and 0.

    Raises:
        RequestError: there is no run with a measured step.
    """
    # Only this needs it, and `shoal train` reads this file on its way.
    import numpy as np

    if not runs:
        raise RequestError("there is nothing to fit: none of the runs has a step that could be used")
    rows = [[run.compute / run.measured, run.communication / run.measured, 1.0 / run.measured] for run in runs]
    typical = _median(run.measured for run in runs)
    pull = np.diag([_PRIOR, _PRIOR, _PRIOR / typical * 10])
    left = np.vstack([np.array(rows), pull])
    right = np.concatenate([np.ones(len(runs)), pull @ np.array([1.0, 1.0, 0.0])])
    free = [0, 1, 2]
    solution = np.array([1.0, 1.0, 0.0])
    for _ in range(3):
        solution = np.zeros(3)
        solution[free] = np.linalg.lstsq(left[:, free], right, rcond=None)[0]
        negative = [place for place in free if solution[place] < 0]
        if not negative:
            break
        # A negative constant means that the runs do not tell it from the others.
        free = [place for place in free if place not in negative]
    floor = 1e-3
    return Fit(
        compute=max(floor, float(solution[0])),
        communication=max(floor, float(solution[1])),
        fixed_seconds=max(0.0, float(solution[2])),
        runs=[run.name for run in runs],
    )
