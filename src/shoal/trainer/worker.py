"""One rank of a run, from its first line to its exit code.

``shoal.trainer.worker RUN_DIR`` is what the supervisor starts (through ``elastic/child.py``); under ``torchrun`` the same
``run_rank`` is called by ``shoal train``. This is one of the two process boundaries where every exception is caught: what
failed, where and why is written down for whoever has to name the culprit, and the process ends at once, so that its peers
notice.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.world import Place, join_world
from shoal.core.config import read_toml, validate
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.elastic.reports import ErrorReport, write_report
from shoal.elastic.verdict import EXIT_INTERRUPTED
from shoal.telemetry.board import Board, Heartbeat, RankSlot
from shoal.telemetry.memory import breakdown, is_out_of_memory, largest_tensors, table
from shoal.trainer.build import build_trainer
from shoal.trainer.config import Recipe
from shoal.trainer.layout import default_threads
from shoal.trainer.loop import Trainer
from shoal.trainer.summary import summarise, write_summary


def run_rank(
    run_dir: Path,
    *,
    resume: bool,
    environment: Mapping[str, str] = os.environ,
    store: dist.Store | None = None,
    slot: RankSlot | None = None,
) -> str:
    """Train this rank's part of the run in ``run_dir`` and return its status. The recipe and the plan are read from there."""
    started = time.monotonic()
    run = RunDir(run_dir)
    recipe = validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    plan = Plan.parse(json.loads(run.plan.read_text())["plan"])
    place = Place.read(environment)
    torch.set_num_threads(recipe.train.threads or default_threads(place.world_size))
    slot = slot or attach_slot(environment)
    with contextlib.ExitStack() as stack:
        if slot is not None:
            stack.enter_context(Heartbeat(slot))
            slot.enter("wait: joining the other ranks", 0)
        world = join_world(environment, deadline_seconds=recipe.elastic.collective_deadline, store=store)
        if slot is not None:
            slot.enter("building model and data", 0)
        resume = resume or place.generation > 0
        trainer = build_trainer(recipe, plan=plan, run_dir=run_dir, resume=resume, world=world, slot=slot)
        stack.enter_context(trainer)
        signal.signal(signal.SIGTERM, lambda *_: trainer.request_stop("SIGTERM"))
        if "SHOAL_SUPERVISOR_PID" not in environment:
            signal.signal(signal.SIGINT, lambda *_: trainer.request_stop("SIGINT"))
        _train_explaining_memory(trainer)
        summary = summarise(trainer, wall_seconds=time.monotonic() - started)
        if world.is_first:
            write_summary(run_dir, summary)
        world.barrier()
        if trainer.persistence.failure is not None:
            raise RunError(f"the last checkpoint could not be written: {trainer.persistence.failure}")
        return trainer.status


def _train_explaining_memory(trainer: Trainer) -> None:
    try:
        trainer.train()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = table(breakdown(trainer.model, trainer.optimizer), largest_tensors(trainer.model, trainer.optimizer))
        raise RunError(f"out of memory at step {trainer.progress.step + 1}: {error}\n{where}") from error


def attach_slot(environment: Mapping[str, str]) -> RankSlot | None:
    """This rank's slot on the supervisor's board; None when nobody supervises."""
    if "SHOAL_BOARD_FD" not in environment:
        return None
    place = Place.read(environment)
    slot = Board.attach(int(environment["SHOAL_BOARD_FD"]), place.world_size).slot(place.rank)
    slot.claim()
    return slot


def report_failure(run_dir: Path, error: BaseException, environment: Mapping[str, str]) -> None:
    """Put down what this rank knows of its failure, where the supervisor looks for it."""
    place = Place.read(environment)
    step, phase = 0, ""
    if "SHOAL_BOARD_FD" in environment:
        state = Board.attach(int(environment["SHOAL_BOARD_FD"]), place.world_size).slot(place.rank).read()
        step, phase = state.step, state.phase
    peer_failure = is_peer_failure(error)
    report = ErrorReport.of(error, rank=place.rank, step=step, phase=phase, peer_failure=peer_failure)
    write_report(run_dir, report)


def is_peer_failure(error: BaseException) -> bool:
    """True when the error only says that another rank went away or did not come."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    # gloo raises plain RuntimeErrors; these are the words that its transport uses.
    marks = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "gloo/transport",
        "Socket closed",
    )
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def main() -> None:
    """Entry point of a supervised rank."""
    run_dir, resume = Path(sys.argv[1]), "--resume" in sys.argv[2:]
    try:
        status = run_rank(run_dir, resume=resume)
    except BaseException as error:
        report_failure(run_dir, error, os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads and groups in an unknown state could keep a dying rank alive, and its peers waiting.
        os._exit(EXIT_WRONG_REQUEST if isinstance(error, RequestError) else EXIT_NO)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED if status == "interrupted" else EXIT_DONE)


if __name__ == "__main__":
    main()
