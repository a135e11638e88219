"""How a run of the supervisor ended, and the pure decision from how every rank ended."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import EXIT_DONE, EXIT_NO
from shoal.launch.verdict import EXIT_INTERRUPTED, Culprit, RankEnd, blame
from shoal.launch.watch import Hang


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
        asked = next((rank for rank in end.ends if rank.heard), None)
        return Outcome(
            status="interrupted",
            signal=asked.heard if asked is not None else None,
            signalled_rank=asked.rank if asked is not None else None,
            restarts=restarts,
            step=step,
        )
    return Outcome(status="failed", culprit=culprit, restarts=restarts, step=step)
