"""``shoal run``: a script on this machine's processes, under the supervisor: the culprit is named, restarts, no leftovers.

No torch: the launcher stays small and answers signals at once while the ranks do the work.
"""

import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.whole import committed_names
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir, make_run_dir, replace_text, withheld
from shoal.engine.resolve import check_processes, default_threads
from shoal.launch.blame import Outcome
from shoal.launch.config import ProcessConfig
from shoal.launch.failurereport import describe, headline
from shoal.launch.group.livefile import LiveFile
from shoal.launch.group.request import LaunchRequest
from shoal.launch.ranks import supervise
from shoal.launch.runlock import read_holder, release_lock, take_lock
from shoal.library.script import DIGEST_VARIABLE, digest_of
from shoal.telemetry.display import build_display
from shoal.telemetry.summaryfile import read_summary, summarise_death, write_summary

_PROGRESS_SECONDS = 5.0
_LIVE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script to run, and how."""

    script: Path
    arguments: Sequence[str] = ()
    """Of the script."""
    plan: Plan
    """With all its degrees."""
    run_dir: Path
    resume: bool = False
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    debug: bool = False
    """Show tracebacks of failures that were foreseen."""
    supervise_with: Callable[[LaunchRequest], Outcome] = supervise
    """Starts and watches the ranks; left out, on this machine."""
    where: str = ""
    """The hosts that they run on, in words; empty for this machine."""


def run_script(request: ScriptRequest) -> tuple[int, dict[str, Any]]:
    """Run a script to its end; returns the exit code and the summary.

    Raises:
        RequestError: there is no such script, or the run directory cannot be used.
    """
    if not request.script.is_file():
        raise RequestError(f"there is no script {request.script}; name a Python file")
    if not request.where:
        check_processes(request.plan.world_size)
    if committed_names(RunDir(request.run_dir).checkpoints) and not request.resume:
        raise RequestError(
            f"{request.run_dir} holds the checkpoints of a run; add --resume to go on, or use another --run-dir"
        )
    with withheld("owner"):
        was_empty = RunDir(request.run_dir).is_empty
        lock = _claim(request.run_dir)
        try:
            return _supervise(request)
        except RequestError:
            # A host that cannot be used: nothing ran.
            if was_empty:
                shutil.rmtree(request.run_dir, ignore_errors=True)
            raise
        finally:
            release_lock(lock, RunDir(request.run_dir).lock)


def _claim(run_dir: Path) -> int:
    try:
        make_run_dir(run_dir)
        held = take_lock(RunDir(run_dir).lock)
    except OSError as error:
        raise RequestError(
            f"{run_dir} cannot be made or written to ({error.strerror}); use another --run-dir"
        ) from error
    if held is None:
        holder = read_holder(RunDir(run_dir).lock)
        raise RequestError(f"{run_dir} is in use by process {holder}; wait for it, or use another --run-dir")
    return held


def _supervise(request: ScriptRequest) -> tuple[int, dict[str, Any]]:
    run, plan, size = RunDir(request.run_dir), str(request.plan), request.plan.world_size
    before = read_summary(request.run_dir)
    replace_text(run.plan, json.dumps({"plan": plan, **request.plan.as_dict()}, indent=2) + "\n")
    run.summary.unlink(missing_ok=True)
    where = request.where and f" on {request.where}"
    print(f"shoal: {plan} on {size} process(es){where}, run directory {request.run_dir}", file=sys.stderr)
    started = time.time()
    outcome = request.supervise_with(
        LaunchRequest(
            module="shoal.library.worker",
            arguments=[str(request.script), *request.arguments],
            num_ranks=size,
            run_dir=request.run_dir,
            run_id=request.run_dir.name,
            threads=0 if request.where else default_threads(size),
            config=request.processes,
            display=build_display(sys.stderr, every=_PROGRESS_SECONDS),
            live=LiveFile(request.run_dir, plan=plan, seconds=_LIVE_SECONDS),
            # On a terminal the display puts lines above what it draws; elsewhere a script's output is the command's.
            output=None if sys.stdout.isatty() and sys.stderr.isatty() else sys.stdout,
            env=_environment(request),
        )
    )
    summary = read_summary(request.run_dir)
    if summary is None or outcome.culprit is not None or outcome.was_forced:
        # The script did not use shoal.Run, or did not come to its end.
        summary = summarise_death(
            status=outcome.status,
            plan=plan,
            world_size=size,
            step=outcome.step,
            cause=_cause(outcome),
            wall_seconds=time.time() - started,
            before=before,
        )
    summary["restarts"] = outcome.restarts
    # What ended the run may be that there is nowhere to write.
    with contextlib.suppress(RunError):
        write_summary(request.run_dir, summary)
    if outcome.culprit is not None:
        can_resume = bool(committed_names(run.checkpoints))
        print(f"error: {describe(outcome.culprit, debug=request.debug, can_resume=can_resume)}", file=sys.stderr)
    return outcome.exit_code, summary


def _environment(request: ScriptRequest) -> dict[str, str]:
    values = {"SHOAL_PLAN": str(request.plan)}
    if request.where:
        values[DIGEST_VARIABLE] = digest_of(request.script)
    return {**values, **({"SHOAL_RESUME": "1"} if request.resume else {})}


def _cause(outcome: Outcome) -> str | None:
    if outcome.culprit is not None:
        return headline(outcome.culprit)
    if outcome.was_forced:
        return "it did not stop within elastic.stop_grace, or Ctrl-C was pressed twice, and was killed"
    return None if outcome.signal is None else signal.Signals(outcome.signal).name
