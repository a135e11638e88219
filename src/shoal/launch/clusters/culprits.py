"""Who failed first in a run that another launcher started: by what the launcher says and what the ranks reported. Pure.

The launcher knows how its processes ended, and the ranks wrote in the run directory why they failed. ``blame.py`` decides, as
for ranks of our own; what differs is that here a rank has a host, and nobody saw where it was.
"""

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from shoal.core.errors import EXIT_NO, EXIT_WRONG_REQUEST
from shoal.launch.blame import Culprit, RankEnd, blame, name_signal
from shoal.launch.errorreport import ErrorReport

_LAUNCHERS_SIGNALS = frozenset({-signal.SIGTERM, -signal.SIGKILL})


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """How a process ended, as its launcher says."""

    rank: int | None
    """None where the launcher names only the host."""
    host: str = ""
    """Empty where the launcher does not say."""
    exit_code: int | None
    """Minus the signal; None where the launcher has another reason."""
    cause: str = ""
    """The launcher's own words, where they say more than an exit code."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed."""

    message: str
    exit_code: int = EXIT_NO
    rank: int | None = None
    """None where nobody knows."""
    step: int = 0
    """The furthest that a rank reported."""
    phase: str = ""


def find_culprit(
    ends: Sequence[TaskEnd], reports: Mapping[int, ErrorReport], *, num_ranks: int, launcher: str, exit_code: int
) -> Failure:
    """The first cause of a failure.

    Args:
        ends: what the launcher said, in its order.
        reports: what ranks wrote of their failures, by rank.
        num_ranks: of the run.
        launcher: its name, for the message.
        exit_code: of the launcher.
    """
    if exit_code == EXIT_WRONG_REQUEST and not reports:
        return Failure(message="", exit_code=EXIT_WRONG_REQUEST)  # the first rank has said what is wrong
    known: dict[int, TaskEnd] = {}
    for end in ends:
        rank = end.rank if end.rank is not None else _only_silent(reports, known, num_ranks)
        if rank is not None:
            known.setdefault(rank, end)
    order = {rank: number for number, rank in enumerate(known)}
    ended = _ended_by_launcher(known, reports)
    found = blame([_rank_end(rank, known.get(rank), reports.get(rank), order, ended) for rank in range(num_ranks)])
    step = max((report.step for report in reports.values()), default=0)
    if found is None:
        words = "; ".join(filter(None, (_say_end(end) for end in ends)))
        return Failure(
            message=f"{launcher} ended with exit code {exit_code}"
            + (f": {words}" if words else "; what it said itself is above"),
            step=step,
        )
    return Failure(
        message=_tell(found, known.get(found.rank), reports),
        exit_code=found.exit_code,
        rank=found.rank,
        step=max(step, found.step),
        phase=found.phase,
    )


def _only_silent(reports: Mapping[int, ErrorReport], known: Mapping[int, TaskEnd], num_ranks: int) -> int | None:
    """The rank that a launcher means that names none: the only one of which nothing else is known."""
    silent = [rank for rank in range(num_ranks) if rank not in reports and rank not in known]
    return silent[0] if len(silent) == 1 else None


def _ended_by_launcher(known: Mapping[int, TaskEnd], reports: Mapping[int, ErrorReport]) -> set[int]:
    """A launcher ends the others when one has failed: who died by its signals after one that failed by itself is no suspect."""
    found: set[int] = set()
    has_cause = False
    for rank, end in known.items():
        if has_cause and end.exit_code in _LAUNCHERS_SIGNALS:
            found.add(rank)
        report = reports.get(rank)
        has_cause = has_cause or report is None or not report.peer_failure
    return found


def _rank_end(
    rank: int, end: TaskEnd | None, report: ErrorReport | None, order: Mapping[int, int], ended: Set[int]
) -> RankEnd:
    if end is not None and end.cause:
        code: int | None = EXIT_NO
    else:
        code = end.exit_code if end is not None else (EXIT_NO if report is not None else None)
    return RankEnd(
        rank=rank,
        exit_code=code,
        # The launcher's order stands for the time: it does not say when.
        ended_at=float(order.get(rank, len(order))) if report is None else report.time,
        step=report.step if report is not None else 0,
        phase=report.phase if report is not None else "",
        report=report,
        signals_sent=frozenset({signal.SIGTERM, signal.SIGKILL} if rank in ended else ()),
    )


def _tell(culprit: Culprit, end: TaskEnd | None, reports: Mapping[int, ErrorReport]) -> str:
    host = f" on host {end.host}" if end is not None and end.host else ""
    report = culprit.report
    where = f" at step {report.step} in phase {report.phase!r}" if report is not None and report.phase else ""
    cause = end.cause if end is not None and end.cause and report is None else culprit.cause
    lines = [f"rank {culprit.rank}{host} failed{where}: {cause}"]
    if report is not None and not report.type.startswith("shoal."):
        lines.append(report.traceback.rstrip())
    for rank, other in sorted(reports.items()):
        if rank != culprit.rank:
            how = "failed in consequence" if other.peer_failure else "failed too"
            first = (other.message.splitlines() or [""])[0]
            lines.append(f"rank {rank} was at step {other.step} in phase {other.phase!r} and {how}: {first}")
    return "\n".join(lines)


def _say_end(end: TaskEnd) -> str:
    where = f"a process on host {end.host}, whose rank it does not say," if end.rank is None else f"rank {end.rank}"
    if end.exit_code is not None and end.exit_code < 0:
        return f"{where} was killed by {name_signal(-end.exit_code)}"
    return f"{where} ended: {end.cause or f'exit code {end.exit_code}'}"
