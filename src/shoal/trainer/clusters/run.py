"""A run that a cluster's own launcher starts and this process stays with: output, one culprit, one exit code, one summary."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from shoal.checkpoint.whole import committed_names
from shoal.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.core.events import RankFailed
from shoal.core.rundir import RunDir
from shoal.launch.clusters import mpi, slurm
from shoal.launch.clusters.attached import AttachedCommand, AttachedEnd, run_attached
from shoal.launch.clusters.culprits import Failure, find_culprit
from shoal.launch.clusters.job import check_slots, read_slots
from shoal.launch.clusters.partitions import check_room
from shoal.launch.clusters.ray import RayRequest, check_ray, run_on_ray
from shoal.launch.errorreport import ErrorReport, read_report
from shoal.telemetry.eventlog import append_event
from shoal.telemetry.summaryfile import read_summary, summarise_death, write_summary
from shoal.trainer.clusters.request import ClusterRun

Launcher = Literal["slurm", "mpi", "ray"]
_ORDERLY = {EXIT_SIGINT, EXIT_SIGTERM}


def check_launcher(launcher: Launcher) -> None:
    """Refuse a launcher that is not installed.

    Raises:
        RequestError: names the package.
    """
    if launcher == "ray":
        check_ray()
    elif launcher == "slurm":
        slurm.refuse_task(os.environ)
        if shutil.which(slurm.PROGRAM) is None:
            raise RequestError(slurm.MISSING)
    else:
        mpi.which_mpi()


def train_on(run: ClusterRun, launcher: Launcher, *, hosts: str | None = None) -> tuple[int, dict[str, Any] | None]:
    """Start the run by a launcher, and stay until it has ended; the exit code, and the summary.

    Args:
        run: what to start.
        launcher: that starts it.
        hosts: of MPI, as ``a:2,b:2``; left out, this one.

    Raises:
        RequestError: the launcher is missing, or too small for the run.
        RunError: it could not be started.
    """
    check_launcher(launcher)
    if launcher == "slurm":
        check_room(run.job, os.environ)
    earlier = _reports(run)
    before, started = read_summary(run.run_dir), time.time()
    job = run.job
    print(
        f"shoal: {run.plan} by {launcher} on {job.nodes} node(s) of {job.per_node} process(es), run directory {run.run_dir}",
        file=sys.stderr,
        flush=True,
    )
    end = _run(run, launcher, hosts)
    summary = read_summary(run.run_dir)
    if end.stop_signal is not None:
        return 128 + end.stop_signal, _note_stop(run, end, summary, before, started)
    if end.exit_code == EXIT_DONE:
        return EXIT_DONE, summary
    if end.exit_code in _ORDERLY and summary is not None and summary != before and summary["status"] == "interrupted":
        return end.exit_code, summary
    failure = find_culprit(
        end.ends,
        {rank: report for rank, report in _reports(run).items() if report != earlier.get(rank)},
        num_ranks=job.num_processes,
        launcher=launcher,
        exit_code=end.exit_code,
    )
    if failure.exit_code == EXIT_WRONG_REQUEST:
        if failure.message:
            print(f"error: {failure.message}", file=sys.stderr)
        return EXIT_WRONG_REQUEST, summary
    return failure.exit_code, _note_failure(run, failure, summary, before, started)


def _run(run: ClusterRun, launcher: Launcher, hosts: str | None) -> AttachedEnd:
    job, grace = run.job, run.recipe.elastic.stop_grace
    if launcher == "ray":
        seconds = run.recipe.elastic.start_deadline
        return run_on_ray(RayRequest(job=job, stop_grace=grace, start_seconds=seconds))
    environment = dict(os.environ)
    if launcher == "slurm":
        return run_attached(
            AttachedCommand(
                name="srun",
                argv=slurm.srun_command(job),
                environment=_without_step(environment),
                reader=slurm.SlurmEnds(),
                stop_grace=grace,
            )
        )
    slots = read_slots(hosts, per_node=job.per_node) if hosts else []
    if slots:
        check_slots(slots, job.num_processes)
    elif job.nodes > 1:
        raise RequestError(
            f"--nodes {job.nodes}: MPI does not tell its processes where the first one is; name the hosts, the first one first: "
            f"--hosts a:{job.per_node},b:{job.per_node}"
        )
    kind = mpi.which_mpi()
    return run_attached(
        AttachedCommand(
            name="mpirun",
            argv=mpi.mpirun_command(job, kind, slots=slots),
            environment=environment,
            reader=mpi.MpiEnds(),
            stop_grace=grace,
        )
    )


def _without_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Inside a batch script srun would take what the script asked of its one task for the step's own."""
    given = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES")
    return {name: value for name, value in environment.items() if name not in given}


def _note_stop(
    run: ClusterRun, end: AttachedEnd, summary: dict[str, Any] | None, before: dict[str, Any] | None, started: float
) -> dict[str, Any]:
    assert end.stop_signal is not None
    name = signal.Signals(end.stop_signal).name
    if summary is None or summary == before or end.was_forced:
        cause = "it did not stop in time, or Ctrl-C was pressed twice, and was killed" if end.was_forced else name
        summary = _death(run, "interrupted", cause, 0, before, started)
    else:
        # The ranks only know that they were asked to stop; which signal the user sent is known here.
        summary = {**summary, "stopped_by": name}
    _write(run, summary)
    return summary


def _note_failure(
    run: ClusterRun, failure: Failure, summary: dict[str, Any] | None, before: dict[str, Any] | None, started: float
) -> dict[str, Any]:
    headline = failure.message.splitlines()[0]
    if failure.rank is not None and run.run_dir.is_dir():
        event = RankFailed(
            culprit_rank=failure.rank,
            step=failure.step,
            phase=failure.phase,
            cause=headline,
            generation=0,
            restarting=False,
        )
        with contextlib.suppress(OSError):
            append_event(RunDir(run.run_dir).supervisor_events, event, rank=None)
    if summary is None or summary == before:
        summary = _death(run, "failed", headline, failure.step, before, started)
    else:
        summary = {**summary, "status": "failed", "stopped_by": headline}
    _write(run, summary)
    can_resume = bool(committed_names(RunDir(run.run_dir).checkpoints))
    advice = f"\ntry: continue from the newest checkpoint of {run.run_dir} with --resume" if can_resume else ""
    print(f"error: {failure.message}{advice}", file=sys.stderr, flush=True)
    return summary


def _death(
    run: ClusterRun, status: str, cause: str, step: int, before: dict[str, Any] | None, started: float
) -> dict[str, Any]:
    return summarise_death(
        status=status,
        plan=str(run.plan),
        world_size=run.job.num_processes,
        step=step,
        cause=cause,
        wall_seconds=time.time() - started,
        before=before,
    )


def _write(run: ClusterRun, summary: dict[str, Any]) -> None:
    # A run that never got as far as its directory has none to say it in.
    if run.run_dir.is_dir():
        with contextlib.suppress(RunError):
            write_summary(run.run_dir, summary)


def _reports(run: ClusterRun) -> dict[int, ErrorReport]:
    """What ranks wrote of their failures."""
    found = {rank: read_report(run.run_dir, rank) for rank in range(run.job.num_processes)}
    return {rank: report for rank, report in found.items() if report is not None}
