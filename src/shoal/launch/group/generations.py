"""Starts of all ranks, one after the other: what becomes of a run whose ranks failed, on one host or on several."""

import itertools
from collections.abc import Callable

from shoal.core.events import RankFailed
from shoal.core.rundir import RunDir
from shoal.launch.blame import GenerationEnd, Outcome, judge
from shoal.launch.failurereport import headline
from shoal.launch.group.request import LaunchRequest
from shoal.telemetry.eventlog import append_event


def run_generations(request: LaunchRequest, run: Callable[[int], GenerationEnd]) -> Outcome:
    """Start all ranks, and start them again when they fail and may be; closes the display.

    Args:
        request: what runs.
        run: runs the generation with this number to its end.
    """
    try:
        for number in itertools.count():
            outcome = judge(run(number), restarts=number)
            culprit = outcome.culprit
            if culprit is None:
                return outcome
            restarting = outcome.status == "failed" and culprit.can_restart and number < request.config.max_restarts
            failed = RankFailed(
                culprit_rank=culprit.rank,
                step=culprit.step,
                phase=culprit.phase,
                cause=culprit.cause,
                generation=number,
                restarting=restarting,
                host=culprit.host,
            )
            append_event(RunDir(request.run_dir).supervisor_events, failed, rank=None)
            if not restarting:
                return outcome
            left = request.config.max_restarts - number - 1
            request.display.message(
                f"{headline(culprit)}\nstarting all ranks again from the newest checkpoint; {left} restarts left"
            )
        raise AssertionError("generations are counted without end")
    finally:
        if request.live is not None:
            request.live.end()
        request.display.close()
