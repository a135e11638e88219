"""A run that somebody else launched: this process is already one rank of ``torchrun``, SLURM or Kubeflow.

The first rank checks the request and takes the run directory; the others learn its name from the store. There is no
supervisor, so the first rank prints progress itself, and restarts are the launcher's business.
"""

import json
import os
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store  # torch types these names only there
from torch.distributed.rendezvous import rendezvous

from shoal.comm.world import Place
from shoal.core.errors import EXIT_DONE, EXIT_SIGTERM, RequestError, RunError, ShoalError
from shoal.telemetry.board import Board
from shoal.telemetry.live import build_display
from shoal.trainer.claim import Claim
from shoal.trainer.launch import describe_summary
from shoal.trainer.measure import measure_own
from shoal.trainer.request import TrainRequest, prepare
from shoal.trainer.summary import read_summary
from shoal.trainer.worker import report_failure, run_rank

_START_DEADLINE = timedelta(seconds=120)
_PROGRESS_SECONDS = 5.0
_LOOK_SECONDS = 0.25


def train_launched(request: TrainRequest) -> int:
    """Be one rank of a launched run; returns the exit code.

    Raises:
        RequestError: the request is wrong; every rank raises the same message.
    """
    place = Place.read(os.environ)
    store, _, _ = next(iter(rendezvous("env://", timeout=_START_DEADLINE)))
    if place.generation > 0:
        request = replace(request, resume=True)
    claim = _claim_as_first(request, store) if place.rank == 0 else None
    run_dir = _learn_run_dir(store)
    progress = PrintedProgress() if place.rank == 0 else None
    try:
        slot = progress.slot if progress is not None else None
        status = run_rank(run_dir, resume=request.resume, store=PrefixStore("ranks", store), slot=slot)
    except Exception as error:
        report_failure(run_dir, error, os.environ)
        raise
    finally:
        if progress is not None:
            progress.close()
        if claim is not None:
            claim.release()
    summary = read_summary(run_dir)
    if place.rank == 0 and summary is not None:
        print(describe_summary(summary, run_dir))
    return EXIT_SIGTERM if status == "interrupted" and summary and summary["stopped_by"] == "SIGTERM" else EXIT_DONE


def _claim_as_first(request: TrainRequest, store: Store) -> Claim | None:
    """Check the request, take its directory and tell the others; they must hear of a refusal too, or they would wait."""
    try:
        prepared = prepare(request, measure_own=measure_own)
        claim = Claim(prepared.run_dir)
        claim.write(prepared.recipe, prepared.layout.plan)
    except ShoalError as error:
        store.set("shoal/start", json.dumps({"error": str(error), "request": isinstance(error, RequestError)}))
        return None
    store.set("shoal/start", json.dumps({"run_dir": str(prepared.run_dir.resolve())}))
    return claim


def _learn_run_dir(store: Store) -> Path:
    found = json.loads(store.get("shoal/start"))
    if "error" in found:
        raise (RequestError if found["request"] else RunError)(found["error"])
    return Path(found["run_dir"])


class PrintedProgress:
    """Progress on stderr from inside the rank, where no supervisor looks: a board of one, and a thread that reads it."""

    def __init__(self) -> None:
        self._board = Board.create(1)
        self.slot = self._board.slot(0)
        self._display = build_display(sys.stderr, every=_PROGRESS_SECONDS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            self._display.update(self._board.read())

    def close(self) -> None:
        """Show the last state and stop."""
        self._closing.set()
        self._thread.join()
        self._display.update(self._board.read())
        self._display.close()
