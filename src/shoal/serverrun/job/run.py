"""A run with parameter servers, seen from the command line: the job, then the closing, then a summary like any other."""

import contextlib
import json
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from shoal.checkpoint.commit import sweep
from shoal.core.errors import EXIT_DONE, EXIT_NO, RunError
from shoal.core.rundir import RunDir
from shoal.engine.resolve import default_threads
from shoal.launch.blame import EXIT_INTERRUPTED
from shoal.launch.group.livefile import LiveFile
from shoal.serverrun.job.job import JobRequest, JobResult, run_job
from shoal.serverrun.notices import count_dropped, count_notices, fall_back_if_refused
from shoal.telemetry.display import build_display
from shoal.telemetry.summaryfile import summarise_death, write_summary
from shoal.trainer.request import Prepared
from shoal.trainer.summary import Ended, summarise_servers


def train_with_servers(prepared: Prepared, before: dict[str, Any] | None) -> Ended:
    """Run a prepared request whose plan has parameter servers."""
    plan, recipe, run_dir = prepared.setup.plan, prepared.recipe, prepared.run_dir
    started = time.time()
    config = recipe.paramserver
    each = f" of {plan.ranks_per_replica} ranks" if plan.ranks_per_replica > 1 else ""
    print(
        f"shoal: {plan} on {plan.ps} server(s), {plan.workers} worker(s){each} and {config.centers} center(s), "
        f"{prepared.setup.total_steps} steps, run directory {run_dir}",
        file=sys.stderr,
    )
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    found = RunDir(run_dir).root / ".closing.json"
    display = build_display(sys.stderr, every=recipe.telemetry.progress_every)
    # A save of which a server died leaves what the others wrote: one that was only slow might still commit it. Not any more here.
    sweep(RunDir(run_dir).checkpoints)
    found.unlink(missing_ok=True)
    # What is published is told beside the events of the roles, as if by one more.
    beside = plan.ps + (plan.workers or 1) * plan.ranks_per_replica + config.centers
    publish = [f"--publish={beside}"] if recipe.publish.is_on else []
    end = run_job(
        JobRequest(
            run_dir=run_dir,
            num_servers=plan.ps,
            num_workers=plan.workers or 1,
            has_backups=plan.backup > 0,
            ranks_per_worker=plan.ranks_per_replica,
            dead_seconds=config.dead_seconds,
            num_centers=config.centers,
            threads=recipe.train.threads or default_threads(plan.world_size),
            resume=prepared.resume,
            max_respawns=config.max_respawns,
            stop_grace=recipe.elastic.stop_grace,
            deadlines=recipe.elastic,
            display=display,
            live=LiveFile(run_dir, plan=str(plan), seconds=recipe.telemetry.live_seconds),
            closing=lambda is_whole: [str(run_dir), str(found), *(["--evaluate"] if is_whole else []), *publish],
            publishing=[str(run_dir), str(beside)] if recipe.publish.is_on else None,
        )
    )
    display.close()
    sweep(RunDir(run_dir).checkpoints)
    wall = time.time() - started
    if end.exit_code == EXIT_DONE and not found.exists():
        cause = "the process that evaluates the last checkpoint left with exit code 0 before it was done: something called exit"
        end = replace(end, exit_code=EXIT_NO, cause=f"{cause}; the checkpoint is whole, and --resume evaluates it")
    if end.exit_code != EXIT_DONE:
        return _failed(prepared, end, before, started=started)
    summary = _summarise(prepared, end, json.loads(found.read_text()), wall_seconds=wall)
    found.unlink()
    write_summary(run_dir, summary)
    code = EXIT_DONE if summary["status"] == "completed" else EXIT_INTERRUPTED
    if end.signal is not None and code == EXIT_INTERRUPTED:
        code = 128 + end.signal
    return Ended(exit_code=code, summary=summary)


def _summarise(prepared: Prepared, end: JobResult, found: dict[str, Any], *, wall_seconds: float) -> dict[str, Any]:
    return summarise_servers(
        found,
        plan=prepared.setup.plan,
        total_steps=prepared.setup.total_steps,
        stopped_by=None if end.signal is None else signal.Signals(end.signal).name,
        wall_seconds=wall_seconds,
        peak_rss_bytes=end.peak_rss_bytes,
        num_deaths=end.num_deaths,
        notices={**count_notices(prepared.run_dir), "messages_dropped": count_dropped(prepared.run_dir)},
    )


def _failed(prepared: Prepared, end: JobResult, before: dict[str, Any] | None, *, started: float) -> Ended:
    summary = summarise_death(
        status="failed" if end.signal is None else "interrupted",
        plan=str(prepared.setup.plan),
        world_size=prepared.setup.world_size,
        step=end.step,
        cause=end.cause.splitlines()[0] if end.cause else "unknown",
        wall_seconds=time.time() - started,
        before=before,
    )
    summary |= {"deaths": end.num_deaths, **count_notices(prepared.run_dir)}
    summary["messages_dropped"] = count_dropped(prepared.run_dir)
    with contextlib.suppress(RunError):
        write_summary(prepared.run_dir, summary)
    print(f"error: {end.cause}", file=sys.stderr)
    with contextlib.suppress(OSError):
        if said := fall_back_if_refused(prepared.run_dir, since=started):
            print(said, file=sys.stderr)
    return Ended(exit_code=end.exit_code, summary=summary, was_orderly=False)
