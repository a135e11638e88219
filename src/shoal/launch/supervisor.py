"""Runs local ranks to their end, starts them again when one fails, and says how it ended.

Shoal has a supervisor of its own because ``torchrun --standalone`` was measured to hang in 2 of 12 kills of a rank, to leave its
workers behind when it is killed itself, not to notice a stopped rank, and to listen on every interface. This one keeps torchrun's
environment, has no thread, listens on nothing, and imports no torch: a process that only waits must be small and quick.
"""

import contextlib
import itertools

from shoal.core.events import RankFailed
from shoal.core.rundir import RunDir
from shoal.launch import forkclient
from shoal.launch.blame import Outcome, judge
from shoal.launch.failurereport import headline
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient
from shoal.launch.generation import Generation
from shoal.launch.launch import LaunchRequest
from shoal.launch.signals import SignalInbox
from shoal.launch.spawn import server_environment
from shoal.telemetry.lines import append_event


def supervise(request: LaunchRequest) -> Outcome:
    """Start the ranks and stay with them until all have ended.

    Every generation has its own board, its own store in a new file, and empty error reports, so nothing of a dead generation can
    be taken for the living one's.

    Raises:
        RunError: a rank could not be started, or this is not the main thread.
    """
    with SignalInbox() as inbox, contextlib.closing(_client_for(request)) as client:
        try:
            for number in itertools.count():
                end = Generation(request, number, inbox, client).run()
                outcome = judge(end, restarts=number)
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
            request.display.close()


def _client_for(request: LaunchRequest) -> ForkClient:
    is_worth_it = request.module and request.num_ranks >= forkclient.FEWEST_TO_FORK
    return ForkClient([request.module, PRELOAD_OPTIMIZER] if is_worth_it else [], server_environment(request))
