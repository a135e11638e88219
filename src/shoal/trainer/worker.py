"""One rank of a run, from its first line to its exit code.

``shoal.trainer.worker RUN_DIR`` is what the supervisor starts (``launch/forkclient.py``); under ``torchrun`` the same
``run_rank`` is called by ``shoal train``. This is one of the two process boundaries where every exception is caught: what
failed, where and why is written down for the supervisor, which names the culprit, and the process ends at once, so that its peers
notice.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.comm.parentdeath import end_if_forked
from shoal.comm.world import join_world
from shoal.core.config import read_toml, validate
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.core.rundir import RunDir, withhold
from shoal.data.fitted import with_fitted
from shoal.engine.exchanged import summarise_exchange
from shoal.engine.resolve import default_threads
from shoal.engine.stop import StopRequest
from shoal.launch.blame import EXIT_INTERRUPTED
from shoal.launch.environments import attach_status, read_place
from shoal.launch.failures import report_failure
from shoal.telemetry.memory import breakdown, is_out_of_memory, largest_tensors, peak_rss_bytes, table
from shoal.telemetry.statusboard import FinalStatus, Heartbeat, RankStatus
from shoal.telemetry.summaryfile import write_summary
from shoal.trainer import sharedmodel
from shoal.trainer.build import build_trainer
from shoal.trainer.claim import read_setup
from shoal.trainer.config import Recipe
from shoal.trainer.elastic.rank import ElasticRank, is_elastic, summary_of
from shoal.trainer.loop import Trainer
from shoal.trainer.profiler import RunProfiler
from shoal.trainer.ratesearch.search import search_rate
from shoal.trainer.ratesearch.table import FIND_RATE

LISTENS_BY_ITSELF = True
"""SIGTERM is held back until ``hear_stop_signals`` (``launch/child.py``)."""


def run_rank(
    run_dir: Path,
    *,
    resume: bool,
    environment: Mapping[str, str] = os.environ,
    store: Store | None = None,
    rank_status: RankStatus | None = None,
    finds_rate: bool = False,
) -> str:
    """Train this rank's part of the run in ``run_dir`` and return its status. The recipe and the plan are read from there.

    With ``finds_rate`` learning rates are tried in place of training, and the summary has their losses.
    """
    started = time.monotonic()
    # First of all: a signal that came before would end this process in place of its first step.
    stop = hear_stop_signals(listen_to_ctrl_c="SHOAL_SUPERVISOR_PID" not in environment)
    run = RunDir(run_dir)
    recipe = validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    recipe = recipe.model_copy(update={"data": with_fitted(recipe.data, run.root)})
    setup = read_setup(run_dir)
    withhold(recipe.run.readable_by)
    place = read_place(environment)
    given = int(environment.get("SHOAL_THREADS", "0"))
    num_local = setup.world_size if is_elastic(environment) else place.local_size or place.world_size
    torch.set_num_threads(recipe.train.threads or given or default_threads(num_local))
    rank_status = rank_status or attach_status(environment)
    with contextlib.ExitStack() as stack:
        if rank_status is not None:
            stack.enter_context(Heartbeat(rank_status))
            rank_status.enter("wait: joining the other ranks", 0)
        if is_elastic(environment):
            member = ElasticRank(
                recipe,
                setup,
                run_dir,
                resume=resume or place.generation > 0,
                place=place,
                environment=environment,
                rank_status=rank_status,
                stop=stop,
            )
            status = _run_views(stack.enter_context(member.taking_part()), run_dir, started)
            if rank_status is not None:
                rank_status.finish(status, stop_signal=stop.signal_number)
            return status
        world = join_world(place, deadline_seconds=recipe.elastic.collective_deadline, store=store)
        if rank_status is not None:
            rank_status.enter("building model and data", 0)
        resume = resume or place.generation > 0
        trainer = build_trainer(
            recipe,
            setup=setup,
            run_dir=run_dir,
            resume=resume,
            world=world,
            rank_status=rank_status,
            stop=stop,
            take_model=sharedmodel.take,
        )
        stack.enter_context(trainer)
        is_profiled = run.forecast.exists() and trainer.engine.asynchronous is None
        profiler = RunProfiler(trainer.engine) if is_profiled else None
        found = search_rate(trainer) if finds_rate else _train_explaining_memory(trainer)
        summary = summarise(trainer, wall_seconds=time.monotonic() - started, profiler=profiler) | found
        if world.is_first:
            write_summary(run_dir, summary)
        world.barrier()
        if trainer.persistence.failure is not None:
            raise RunError(f"the last checkpoint could not be written: {trainer.persistence.failure}")
    if rank_status is not None:
        rank_status.finish(trainer.status, stop_signal=stop.signal_number)
    return trainer.status


def _run_views(member: ElasticRank, run_dir: Path, started: float) -> FinalStatus:
    """Take part in one view after another, until the run is over."""
    for view in member.views():
        trainer: Trainer | None = None
        try:
            trainer = member.build(view)
            member.train(trainer)
            summary = summarise(trainer, wall_seconds=time.monotonic() - started)
            if trainer.world.is_first:
                write_summary(run_dir, summary | {"elastic": summary_of(member.counts)})
            trainer.world.barrier()
            failure, status = trainer.persistence.failure, trainer.status
            trainer.close()
        except BaseException as error:  # It ends this process, or leads to the next view.
            member.leave(trainer, error)
            trainer = None
            continue
        if failure is not None:
            raise RunError(f"the last checkpoint could not be written: {failure}")
        return status
    raise AssertionError("views are without end")


def hear_stop_signals(*, listen_to_ctrl_c: bool) -> StopRequest:
    """A request to stop that this process's signals make, from now on: they may come while the model is still being built."""
    stop = StopRequest()
    # srun and mpirun hand on SIGUSR2 and leave the rank its time; what they do at SIGTERM is over after a second.
    stop.listen((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2) if listen_to_ctrl_c else (signal.SIGTERM,))
    # What came before there was somebody to hear it was held back (``launch/forkserver.py``), and is heard now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return stop


def _train_explaining_memory(trainer: Trainer) -> dict[str, Any]:
    try:
        trainer.train()
        return {}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = table(breakdown(trainer.model, trainer.optimizer), largest_tensors(trainer.model, trainer.optimizer))
        raise RunError(f"out of memory at step {trainer.progress.step + 1}: {error}\n{where}") from error


def summarise(trainer: Trainer, *, wall_seconds: float, profiler: RunProfiler | None = None) -> dict[str, Any]:
    """The summary of a run that ended in an orderly way. All ranks call it together; each gets the same answer."""
    seen = {} if profiler is None else {"forecast": {"measured": profiler.measured()}}
    progress = trainer.progress
    peak = torch.tensor([peak_rss_bytes()], dtype=torch.int64, device=trainer.world.device)
    peaks = [int(tensor) for tensor in trainer.world.all_gather(peak)]
    seconds = progress.trained_seconds
    exchanged = summarise_exchange(trainer.engine, trainer.world)
    return {
        "status": trainer.status,
        "stopped_by": trainer.stopped_by,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "rollbacks": progress.recovery.rollbacks,
        "epochs_proved": 0 if progress.receipt is None else progress.receipt.proved,
        "first_loss": progress.first_loss,
        "final_loss": progress.last_loss,
        "validation_loss": progress.validation_loss,
        "validation_accuracy": progress.validation_accuracy,
        **({"validation_metrics": dict(progress.validation_metrics)} if progress.validation_metrics else {}),
        "baseline_loss": trainer.data.spec.baseline_loss,
        "tokens_per_s": progress.tokens / seconds if seconds > 0 else 0.0,
        "samples_per_s": progress.tokens / trainer.data.spec.tokens_per_sample / seconds if seconds > 0 else 0.0,
        "wall_s": wall_seconds,
        "world_size": trainer.world.size,
        "plan": str(trainer.plan),
        "peak_rss_bytes": peaks,
        "weights_sha256": trainer.hash_weights(),
        **({} if trainer.adapt is None else {"adapt": trainer.adapt.event(progress.step).as_dict()}),
        **({} if trainer.engine.islands is None else {"island_distance": trainer.engine.islands.distance()}),
        **exchanged,
        **({} if trainer.publisher is None else {"publish": trainer.publisher.summary()}),
        "checkpoint_error": trainer.persistence.failure,
        **seen,
    }


def main() -> None:
    """Entry point of a supervised rank."""
    # The supervisor asks a rank that hangs for its stacks before it ends it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    owner = os.getpid()
    run_dir, resume, finds_rate = Path(sys.argv[1]), "--resume" in sys.argv[2:], FIND_RATE in sys.argv[2:]
    try:
        status = run_rank(run_dir, resume=resume, finds_rate=finds_rate)
    except BaseException as error:
        end_if_forked(owner)
        report_failure(run_dir, error, os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads and groups in an unknown state could keep a dying rank alive, and its peers waiting.
        os._exit(EXIT_WRONG_REQUEST if isinstance(error, RequestError) else EXIT_NO)
    end_if_forked(owner)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED if status == "interrupted" else EXIT_DONE)


if __name__ == "__main__":
    main()
