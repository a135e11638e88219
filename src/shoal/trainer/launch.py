"""A run on this machine: take the run directory, let the supervisor start the ranks, and turn what happened into a summary.

No torch: the launcher stays small and answers signals at once while the ranks do the work.
"""

import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.checkpoint.whole import committed_names
from shoal.core.errors import EXIT_DONE, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.core.rundir import RunDir, withheld
from shoal.engine.resolve import check_processes, default_threads
from shoal.launch.blame import Outcome
from shoal.launch.failurereport import describe, headline
from shoal.launch.group.livefile import LiveFile
from shoal.launch.group.request import THREADS_THERE, LaunchRequest
from shoal.launch.ranks import supervise
from shoal.telemetry.display import build_display
from shoal.telemetry.summaryfile import read_summary, summarise_death, write_summary
from shoal.trainer.claim import Claim
from shoal.trainer.elastic.membership import HostMembership, build_membership, ranks_at_start
from shoal.trainer.online.config import NEVER
from shoal.trainer.request import Prepared, already_finished, say_finished
from shoal.trainer.summary import Ended, keep_forecast, with_forecast

WORKER = "shoal.trainer.worker"
SHARED_MODEL = "shoal.trainer.sharedmodel:build"
"""Called once for all ranks, before they are forked."""
RunJob = Callable[[Prepared, "dict[str, Any] | None"], Ended]
"""Runs a prepared request in a run directory that is its own, given the summary of an earlier start there."""


def train_supervised(
    prepared: Prepared,
    *,
    debug: bool = False,
    forecast: Mapping[str, Any] | None = None,
    run_job: RunJob | None = None,
) -> Ended:
    """Run a prepared request to its end.

    Args:
        prepared: the request.
        debug: show tracebacks.
        forecast: what was predicted of it; the summary then says beside it what was measured.
        run_job: starts and watches the processes; left out, the ranks of a plan without servers.

    Raises:
        RequestError: the plan has more ranks than this machine runs.
    """
    if run_job is None:
        check_processes(prepared.setup.world_size)
    run_dir = prepared.run_dir
    finished = already_finished(prepared)
    if finished is not None:
        print(say_finished(run_dir, finished, prepared.setup.total_steps), file=sys.stderr)
        return Ended(exit_code=EXIT_DONE, summary=finished)
    with withheld(prepared.recipe.run.readable_by):
        return _train_in(prepared, debug=debug, forecast=forecast, run_job=run_job)


def _train_in(prepared: Prepared, *, debug: bool, forecast: Mapping[str, Any] | None, run_job: RunJob | None) -> Ended:
    """Take the run directory, and run."""
    run_dir = prepared.run_dir
    was_empty, saved = RunDir(run_dir).is_empty, committed_names(RunDir(run_dir).checkpoints)
    claim = Claim(run_dir, readers=prepared.recipe.run.readable_by)
    before = read_summary(run_dir)
    try:
        claim.write(prepared.recipe, prepared.setup.plan, prepared.setup)
        page = keep_forecast(run_dir, forecast, resume=prepared.resume)
        ended = run_job(prepared, before) if run_job is not None else supervise_ranks(prepared, before, debug=debug)
        # A restart may find the data changed; what was trained before it stays.
        if ended.exit_code == EXIT_WRONG_REQUEST and committed_names(RunDir(run_dir).checkpoints) == saved:
            if was_empty:
                # Nothing ran, so nothing is left that a later --resume could take for a run.
                shutil.rmtree(run_dir, ignore_errors=True)
            else:
                claim.put_back()
        return ended if page is None else with_forecast(ended, page, run_dir)
    except RequestError:
        # A host that cannot be used: nothing ran.
        if was_empty and not committed_names(RunDir(run_dir).checkpoints):
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    finally:
        claim.release()


def _policy_of(prepared: Prepared) -> Callable[[Sequence[str]], HostMembership] | None:
    """Makes what decides who takes part, in a run that goes on when ranks die; None in any other."""
    elastic, plan = prepared.recipe.elastic, prepared.setup.plan
    if elastic.mode == "restart":
        return None
    return lambda hosts: build_membership(elastic, elastic, plan, hosts=hosts)


def _tell_end(outcome: Outcome, cause: str, *, can_resume: bool, debug: bool) -> None:
    if outcome.status == "failed" and outcome.culprit is not None:
        print(f"error: {describe(outcome.culprit, debug=debug, can_resume=can_resume)}", file=sys.stderr)
    else:
        kept = "the newest checkpoint is older than the stop" if can_resume else "there is no checkpoint"
        print(f"stopped: {cause}; {kept}", file=sys.stderr)


def _shared_model(prepared: Prepared, threads: int) -> list[str]:
    """What is called once for all ranks of a host, with its arguments."""
    data = json.dumps(asdict(prepared.spec))
    return [SHARED_MODEL, str(prepared.run_dir), data, str(threads or THREADS_THERE)]


def _why_shared(prepared: Prepared) -> str:
    """Why all hosts have to share the run directory; empty where they need not."""
    if prepared.setup.plan.ps:
        return "every server writes its part of a checkpoint there; give a --run-dir on a file system that all share"
    if prepared.recipe.elastic.mode != "restart":
        return (
            "with elastic.mode shrink any host may be the one that is left; give a --run-dir on a file system that all share, or "
            "set elastic.mode to restart"
        )
    return ""


def _cause_of(outcome: Outcome) -> str:
    """Why ranks ended that left no summary."""
    if outcome.culprit is not None:
        return headline(outcome.culprit)
    if outcome.was_forced:
        return "it did not stop within elastic.stop_grace, or Ctrl-C was pressed twice, and was killed"
    return "it was stopped before its first step"


def _say_length(steps: int) -> str:
    return f"{steps} steps" if steps < NEVER else "until it is told to stop"


def _num_ranks(prepared: Prepared) -> int:
    return ranks_at_start(prepared.recipe.elastic, prepared.setup.plan)


def _host_rules(prepared: Prepared) -> dict[str, Any]:
    """What a request says of several hosts."""
    return {
        "takes_hosts": prepared.recipe.elastic.starts_more,
        "why_shared": _why_shared(prepared),
        "survives_hosts": prepared.setup.plan.ps > 0,
    }


def supervise_ranks(
    prepared: Prepared,
    before: dict[str, Any] | None,
    *,
    debug: bool,
    arguments: Sequence[str] = (),
    supervise_with: Callable[[LaunchRequest], Outcome] = supervise,
    where: str = "",
    module: str = WORKER,
) -> Ended:
    """Start the ranks of a plan in a run directory that is the run's own, and stay until all have ended.

    Args:
        prepared: the request.
        before: the summary of an earlier start there.
        debug: show tracebacks.
        arguments: further ones of every rank.
        supervise_with: starts and watches the ranks; left out, on this machine.
        where: the hosts that they run on, in words; empty for this machine.
        module: what a rank is; with parameter servers on several hosts, the process of a role.
    """
    started = time.time()
    run_dir, plan, world_size = prepared.run_dir, str(prepared.setup.plan), _num_ranks(prepared)
    threads = prepared.recipe.train.threads or (0 if where else default_threads(world_size))
    print(
        f"shoal: {plan} on {world_size} process(es){where and f' on {where}'}, {_say_length(prepared.setup.total_steps)}, "
        f"run directory {run_dir}",
        file=sys.stderr,
    )
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    outcome = supervise_with(
        LaunchRequest(
            module=module,
            arguments=[str(run_dir), *(["--resume"] if prepared.resume else []), *arguments],
            shared=_shared_model(prepared, threads) if module == WORKER else (),
            num_ranks=world_size,
            run_dir=run_dir,
            run_id=run_dir.name,
            last_step=prepared.setup.total_steps,
            threads=threads,
            config=prepared.recipe.elastic,
            build_policy=_policy_of(prepared),
            **_host_rules(prepared),
            display=build_display(sys.stderr, every=prepared.recipe.telemetry.progress_every),
            live=LiveFile(run_dir, plan=plan, seconds=prepared.recipe.telemetry.live_seconds),
        )
    )
    culprit, summary = outcome.culprit, read_summary(run_dir)
    # The summary of an earlier start says nothing of this one.
    if summary is not None and summary != before and culprit is None and not outcome.was_forced:
        if outcome.signal is not None:
            # The ranks only know that they were asked to stop; which signal the user sent, the supervisor knows.
            summary["stopped_by"] = signal.Signals(outcome.signal).name
            if outcome.signalled_rank is not None:
                summary["stopped_by"] += f" to rank {outcome.signalled_rank} alone"
            write_summary(run_dir, summary)
        return Ended(exit_code=outcome.exit_code, summary=summary)
    cause = _cause_of(outcome)
    can_resume = bool(committed_names(RunDir(run_dir).checkpoints))
    summary = summarise_death(
        status=outcome.status,
        plan=plan,
        world_size=world_size,
        step=outcome.step,
        cause=cause,
        wall_seconds=time.time() - started,
        before=before,
    )
    if outcome.signal is not None and culprit is None and not outcome.was_forced:
        summary["stopped_by"] = signal.Signals(outcome.signal).name
    # What ended the run may be that there is nowhere to write.
    with contextlib.suppress(RunError):
        write_summary(run_dir, summary)
    _tell_end(outcome, cause, can_resume=can_resume, debug=debug)
    return Ended(exit_code=outcome.exit_code, summary=summary, was_orderly=False)
