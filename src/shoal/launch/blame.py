"""Who is to blame. One rank's death makes the others fail too, seconds later and with other words; only the first cause helps.

Pure: how every rank ended goes in, the culprit comes out. A rank that the watch found hanging is the culprit, because the watch
only speaks while nothing has failed yet. Otherwise this is the order of blame, and within one row the order in time:

    1  killed by a signal that we did not send (but not SIGABRT, by which libraries give up when a peer is gone)
    2  an exception, an exit or an abort of its own; an exit code of 0 too, where the rank has not said that it is done
    3  still running, and not waiting, when others had waited for it in vain
    4  a failure that only says that a peer is gone
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST
from shoal.launch.errorreport import ErrorReport
from shoal.launch.hangs import Hang, is_waiting
from shoal.telemetry.statusboard import FinalStatus

EXIT_INTERRUPTED = 3
"""The exit code of a rank that was asked to stop and did so in an orderly way."""

CulpritKind = Literal["signal", "exception", "exit", "hang", "host"]


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended, as far as can be seen from outside."""

    rank: int
    exit_code: int | None
    """As ``subprocess`` gives it: minus the signal; None when the process could not be ended."""
    ended_at: float
    """Wall-clock seconds."""
    step: int = 0
    phase: str = ""
    phase_count: int = 0
    final_status: FinalStatus = ""
    """Its last word on the board. An exit code alone proves nothing."""
    stop_signal: int = 0
    """The signal by which it was asked to stop, if it was."""
    last_step: int = 0
    """Of the run; 0 when unknown."""
    signals_sent: frozenset[int] = frozenset()
    """What we sent it ourselves."""
    report: ErrorReport | None = None
    resident_bytes: int | None = None
    """Last known memory."""
    tail: str = ""
    """The last lines it wrote to its standard error."""
    log: str = ""
    """The file with all of its output."""
    host: str = ""
    """Where it ran, where there are several."""

    @property
    def was_ended_by_us(self) -> bool:
        """True when it died of a signal that we sent, or did not die at all."""
        return self.exit_code is None or (self.exit_code < 0 and -self.exit_code in self.signals_sent)

    @property
    def is_orderly(self) -> bool:
        """True when it did what was asked of it, by its own word."""
        return self.is_complete or (self.exit_code == EXIT_INTERRUPTED and self.final_status == "interrupted")

    @property
    def is_complete(self) -> bool:
        """True when it did all there was to do, by its own word."""
        return self.exit_code == EXIT_DONE and self.final_status == "completed"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The rank that failed first, and everything that is known about it."""

    rank: int
    step: int
    phase: str
    kind: CulpritKind
    cause: str
    """One line: the signal, the exception, or how long it was silent."""
    exit_code: int = EXIT_NO
    """What the command should exit with: 2 when the rank found that the request was wrong."""
    signal: int | None = None
    report: ErrorReport | None = None
    tail: str = ""
    resident_bytes: int | None = None
    oom_kills: int = 0
    """Kills by the kernel's out-of-memory killer, anywhere on this machine, while the ranks ran."""
    log: str = ""
    others: tuple[str, ...] = ()
    """One line for each other rank: where it was, and how it ended."""
    host: str = ""
    """Where it ran, where there are several."""

    @property
    def can_restart(self) -> bool:
        """False when starting again would find the same wrong request, or the same steps to the same end."""
        is_final = self.report is not None and self.report.exit == "final"
        return self.exit_code != EXIT_WRONG_REQUEST and not is_final


def blame(ends: Sequence[RankEnd], *, hang: Hang | None = None, oom_kills: int = 0) -> Culprit | None:
    """The culprit among these ends; None when every rank ended as it was asked to."""
    if hang is not None:
        return _accuse(ends[hang.rank], ends, hang=hang, oom_kills=oom_kills)
    suspects = [end for end in ends if not end.is_orderly and not end.was_ended_by_us]
    if not suspects:
        return None
    first = min(suspects, key=lambda end: (_row(end), _when(end), end.rank))
    absent = _absent(ends) if _row(first) == _CONSEQUENCE else None
    if absent is not None:
        reason = "it did not arrive where the others waited for it"
        return _accuse(absent, ends, hang=Hang(rank=absent.rank, reason=reason), oom_kills=oom_kills)
    return _accuse(first, ends, hang=None, oom_kills=oom_kills)


def name_signal(number: int) -> str:
    """``9`` -> ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


_FOREIGN_SIGNAL, _OF_ITS_OWN, _CONSEQUENCE = range(3)


def _row(end: RankEnd) -> int:
    if end.exit_code is not None and end.exit_code < 0 and -end.exit_code != signal.SIGABRT:
        return _FOREIGN_SIGNAL
    is_consequence = end.report is not None and end.report.peer_failure
    return _CONSEQUENCE if is_consequence else _OF_ITS_OWN


def _when(end: RankEnd) -> float:
    # A report is written before the exit is seen; a clock that jumped must not make it the later one.
    return end.ended_at if end.report is None else min(end.report.time, end.ended_at)


def _absent(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that others waited for: it still ran when we ended it, and it was not waiting itself."""
    absent = [end for end in ends if end.was_ended_by_us and not is_waiting(end.phase)]
    return min(absent, key=lambda end: (end.phase_count, end.rank)) if absent else None


def _accuse(end: RankEnd, ends: Sequence[RankEnd], *, hang: Hang | None, oom_kills: int) -> Culprit:
    report = end.report if hang is None else None
    code = end.exit_code
    number: int | None = None
    kind: CulpritKind
    if hang is not None:
        kind, cause = "host" if hang.is_host else "hang", hang.reason
    elif report is not None:
        kind, cause = "exception", _exception_line(report)
    elif code is not None and code < 0:
        kind, cause, number = "signal", f"killed by {name_signal(-code)}", -code
    elif code in (EXIT_DONE, EXIT_INTERRUPTED):
        kind, cause = "exit", _left_line(end)
    else:
        kind, cause = "exit", f"exit code {code}, without a report"
    return Culprit(
        rank=end.rank,
        step=report.step if report is not None else end.step,
        phase=report.phase if report is not None else end.phase,
        kind=kind,
        cause=cause,
        exit_code=EXIT_WRONG_REQUEST if report is not None and report.exit == "request" else EXIT_NO,
        signal=number,
        report=report,
        tail=end.tail,
        resident_bytes=end.resident_bytes,
        oom_kills=oom_kills,
        log=end.log,
        others=tuple(_other_line(other) for other in ends if other.rank != end.rank),
        host=end.host,
    )


def _exception_line(report: ErrorReport) -> str:
    # Errors raised on purpose say all that is needed in their message; a type name before it would only be noise.
    return report.message if report.type.startswith("shoal.") else f"{report.type}: {report.message}"


def _left_line(end: RankEnd) -> str:
    when = f"before step {end.last_step}, the last, was done" if end.last_step else "without having finished"
    return f"it left with exit code {end.exit_code} {when}: something that it runs called exit"


def _other_line(end: RankEnd) -> str:
    name = f"rank {end.rank} on {end.host}" if end.host else f"rank {end.rank}"
    where = f"{name} was at step {end.step} in phase {end.phase!r}" if end.phase else f"{name} was starting"
    if end.was_ended_by_us:
        return f"{where} and was stopped"
    if end.report is not None:
        lines = _exception_line(end.report).splitlines() or [""]
        return f"{where} and {'failed in consequence' if end.report.peer_failure else 'failed too'}: {lines[0]}"
    if end.exit_code is not None and end.exit_code < 0:
        return f"{where} and was killed by {name_signal(-end.exit_code)}"
    return f"{where} and ended with exit code {end.exit_code}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended."""

    status: Literal["completed", "interrupted", "failed"]
    signal: int | None = None
    """The signal that asked the supervisor, or one rank alone, to stop; None when the ranks stopped by themselves, as at a time
    limit."""
    signalled_rank: int | None = None
    """The rank that was sent the signal, when the supervisor was not."""
    culprit: Culprit | None = None
    """Always there when it failed; when it was interrupted, a rank that failed while it was stopping."""
    was_forced: bool = False
    """True when ranks had to be killed, because they did not stop in time or Ctrl-C was pressed twice."""
    restarts: int = 0
    step: int = 0
    """The furthest step that any rank was in."""

    @property
    def exit_code(self) -> int:
        """What the command should exit with."""
        if self.status == "failed":
            return self.culprit.exit_code if self.culprit is not None else EXIT_NO
        return EXIT_DONE if self.status == "completed" or self.signal is None else 128 + self.signal


@dataclass(frozen=True, kw_only=True)
class GenerationEnd:
    """How one start of the ranks ended."""

    ends: Sequence[RankEnd]
    stop_signal: int | None = None
    hang: Hang | None = None
    oom_kills: int = 0


def judge(end: GenerationEnd, *, restarts: int) -> Outcome:
    """What the ends of all ranks amount to."""
    step = max((rank.step for rank in end.ends), default=0)
    # None at all was stopped before the first was there.
    if end.ends and all(rank.is_complete for rank in end.ends):
        return Outcome(status="completed", restarts=restarts, step=step)
    culprit = blame(end.ends, hang=end.hang, oom_kills=end.oom_kills)
    if end.stop_signal is not None:
        was_forced = any(rank.exit_code == -signal.SIGKILL and rank.was_ended_by_us for rank in end.ends)
        return Outcome(
            status="interrupted",
            signal=end.stop_signal,
            culprit=culprit,
            was_forced=was_forced,
            restarts=restarts,
            step=step,
        )
    if culprit is None and any(rank.exit_code == EXIT_INTERRUPTED for rank in end.ends):
        asked = next((rank for rank in end.ends if rank.stop_signal), None)
        return Outcome(
            status="interrupted",
            signal=asked.stop_signal if asked is not None else None,
            signalled_rank=asked.rank if asked is not None else None,
            restarts=restarts,
            step=step,
        )
    return Outcome(status="failed", culprit=culprit, restarts=restarts, step=step)
