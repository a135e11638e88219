"""A run that somebody else launched: this process is already one rank of torchrun, SLURM, MPI or another.

The first rank checks the request and takes the run directory; the others learn its name from the store. There is no
supervisor, so the first rank prints progress itself, and restarts are the launcher's business.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store  # torch types these names only there

from shoal.comm.parentdeath import end_if_forked
from shoal.comm.store.beats import Beats, Failure
from shoal.comm.store.rounds import agree_on_round
from shoal.comm.world import connect_store, open_store, seal_store
from shoal.core.errors import (
    EXIT_DONE,
    EXIT_NO,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_WRONG_REQUEST,
    AgreedError,
    RequestError,
    RunError,
    ShoalError,
)
from shoal.core.place import Place
from shoal.core.rundir import RunDir, make_run_dir, replace_text, withhold
from shoal.launch.environments import read_place
from shoal.launch.errorreport import clear_reports
from shoal.launch.failures import explain_exit, is_peer_failure, report_failure
from shoal.telemetry.display import build_display
from shoal.telemetry.statusboard import StatusBoard, StatusReading
from shoal.telemetry.summaryfile import read_summary, summarise_death, write_summary
from shoal.trainer.admission.facts import facts_of, pass_admission
from shoal.trainer.claim import Claim, read_plan
from shoal.trainer.config import load_recipe, read_start_deadline
from shoal.trainer.elastic.limits import refuse_elastic_launched
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, already_finished, prepare, say_finished
from shoal.trainer.summary import describe_summary
from shoal.trainer.worker import run_rank

_PROGRESS_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_FAILURE_SECONDS = 3.0
"""How long a rank that lost another one waits for that one to say why."""
_START_KEY = "shoal/start"
# A stop request that came from another rank's signal arrives without its name; launchers send SIGTERM.
_EXIT_CODES = {"SIGINT": EXIT_SIGINT, "SIGTERM": EXIT_SIGTERM, "SIGUSR2": EXIT_SIGTERM, "signal": EXIT_SIGTERM}


def train_launched(request: TrainRequest) -> tuple[int, dict[str, Any] | None]:
    """Be one rank of a launched run; returns the exit code, and on the first rank the summary.

    A wrong request is told by the first rank; the others end with its exit code, and a message less.

    Raises:
        RequestError: the request is wrong.
        RunError: this rank failed; says where, with its traceback.
    """
    place, owner = read_place(os.environ), os.getpid()
    seconds = read_start_deadline(request.recipe, request.overrides)
    opened = open_store(place, timedelta(seconds=seconds))
    number = agree_on_round(
        opened, rank=place.rank, world_size=place.world_size, host=socket.gethostname(), seconds=seconds
    )
    store = PrefixStore(f"round-{number}", opened)
    if number > 0 or place.generation > 0:
        # The ranks before may have died before there was a directory.
        request = replace(request, resume=True, may_start=True)
    claim = _claim_as_first(request, store) if place.rank == 0 else None
    found = _hear_of_start(store, seconds)
    if "error" in found and place.rank > 0:
        return (EXIT_WRONG_REQUEST if found["request"] else EXIT_NO), None
    run_dir = _read_start(found)
    if run_dir is None:
        return EXIT_DONE, None
    if place.rank > 0:
        _take_over(run_dir, found)
    try:
        beats = _enter_together(request, found, place, store, number, seconds=seconds)
    except ShoalError as error:
        if claim is not None:
            claim.put_back()
            claim.release()
        if place.rank > 0 and isinstance(error, AgreedError):
            return error.exit_code, None
        raise
    board = StatusBoard.create(1)
    progress = PrintedProgress(board) if place.rank == 0 else None
    started, before = time.time(), read_summary(run_dir)
    try:
        run_rank(run_dir, resume=request.resume, store=PrefixStore("ranks", store), rank_status=board.of_rank(0))
    except (Exception, SystemExit) as error:
        end_if_forked(owner)
        first = beats.await_failure(_FAILURE_SECONDS) if is_peer_failure(error) else beats.post(f"{error}")
        state = board.of_rank(0).read()
        report_failure(run_dir, error, os.environ, state=state)
        if claim is not None:
            _note_death(claim, run_dir, error, state, place, before, wall_seconds=time.time() - started)
        if place.rank > 0 and isinstance(error, AgreedError):
            return error.exit_code, None
        raise _tell(explain_exit(error), place.rank, state, first) from error
    finally:
        beats.close()
        if progress is not None:
            progress.close()
        if claim is not None:
            claim.release()
    summary = read_summary(run_dir)
    if place.rank == 0 and summary is not None:
        print(describe_summary(summary, run_dir))
    return _EXIT_CODES.get(str(summary["stopped_by"]) if summary else "", EXIT_DONE), summary


def _enter_together(
    request: TrainRequest, found: dict[str, Any], place: Place, store: Store, number: int, *, seconds: float
) -> Beats:
    """See that all ranks have the same, and begin to watch over one another.

    Raises:
        AgreedError: they have not; all raise the same.
        RunError: a rank did not come.
    """
    hosts = pass_admission(
        store,
        facts_of(Path(request.recipe), [request.plan, *request.overrides]),
        rank=place.rank,
        world_size=place.world_size,
        seconds=seconds,
    )
    own = PrefixStore(f"round-{number}", connect_store(place, timedelta(seconds=seconds)))
    own.set(f"connected/{place.rank}", "1")
    if place.rank == 0:
        _seal_when_all_are_connected(own, place, seconds)
    return Beats(own, rank=place.rank, hosts=hosts, lease_seconds=found["lease_seconds"])


def _seal_when_all_are_connected(store: Store, place: Place, seconds: float) -> None:
    try:
        store.wait([f"connected/{rank}" for rank in range(place.world_size)], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RunError(
            f"rank 0 waited {seconds:g} s for all ranks to connect to its store a second time: {error}"
        ) from error
    seal_store()


def _note_death(
    claim: Claim,
    run_dir: Path,
    error: BaseException,
    state: StatusReading,
    place: Place,
    before: dict[str, Any] | None,
    *,
    wall_seconds: float,
) -> None:
    """Leave a summary of a run that failed, or nothing where the request was wrong."""
    if isinstance(error, RequestError) and state.step == 0:
        claim.put_back()
        return
    dead = summarise_death(
        status="failed",
        plan=read_plan(run_dir),
        world_size=place.world_size,
        step=state.step,
        cause=f"rank {place.rank}: {type(error).__name__}: {error}",
        wall_seconds=wall_seconds,
        before=before,
    )
    with contextlib.suppress(RunError):
        write_summary(run_dir, dead)


def _tell(error: BaseException, rank: int, state: StatusReading, first: Failure | None = None) -> ShoalError:
    """The error as the user should read it; a traceback only where nobody foresaw it."""
    where = f"rank {rank} failed at step {state.step} in phase {state.phase!r}"
    if isinstance(error, RequestError):
        return error
    if is_peer_failure(error) and first is not None:
        return RunError(f"{where}, because another rank failed first: {first}")
    if is_peer_failure(error):
        return RunError(f"{where}, because another rank went away: look for that rank's own message. ({error})")
    if isinstance(error, ShoalError):
        return RunError(f"{where}: {error}")
    return RunError(f"{where}: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}")


def _claim_as_first(request: TrainRequest, store: Store) -> Claim | None:
    """Check the request, take its directory and tell the others; they must hear of a refusal too, or they would wait."""
    try:
        refuse_elastic_launched(load_recipe(request.recipe, request.overrides))
        prepared = prepare(request, own=OwnPartsHere())
        if prepared.setup.plan.ps:
            raise RequestError(
                f"plan {str(prepared.setup.plan)!r}: parameter servers are not ranks of a launcher; start `shoal train` by "
                "itself, or each role with `shoal role`"
            )
        finished = already_finished(prepared)
        if finished is not None:
            print(say_finished(prepared.run_dir, finished, prepared.setup.total_steps), file=sys.stderr)
            store.set(_START_KEY, json.dumps({"finished": True}))
            return None
        withhold(prepared.recipe.run.readable_by)
        claim = Claim(prepared.run_dir, readers=prepared.recipe.run.readable_by)
        claim.write(prepared.recipe, prepared.setup.plan, prepared.setup)
        clear_reports(prepared.run_dir)
    except Exception as error:
        refusal = {"error": f"{error}", "request": isinstance(error, RequestError)}
        store.set(_START_KEY, json.dumps(refusal))
        if not isinstance(error, ShoalError):
            raise
        return None
    run, readers = RunDir(prepared.run_dir), prepared.recipe.run.readable_by
    start = {
        "run_dir": str(prepared.run_dir.resolve()),
        "recipe": run.recipe.read_text(),
        "plan": run.plan.read_text(),
        "readers": readers,
        "lease_seconds": prepared.recipe.elastic.lease_seconds,
    }
    store.set(_START_KEY, json.dumps(start))
    return claim


def _take_over(run_dir: Path, found: dict[str, Any]) -> None:
    """Make the run directory on a host that does not share the first rank's: recipe and plan come from there.

    Raises:
        RunError: it cannot be made; names the host.
    """
    run = RunDir(run_dir)
    try:
        withhold(found["readers"])
        make_run_dir(run_dir, found["readers"])
        for path, text in ((run.recipe, found["recipe"]), (run.plan, found["plan"])):
            if not path.exists() or path.read_text() != text:
                replace_text(path, text)
    except OSError as error:
        raise RunError(
            f"{run_dir} cannot be made on host {socket.gethostname()} ({error.strerror}); use a --run-dir that every host can "
            "write to"
        ) from error


def _hear_of_start(store: Store, seconds: float) -> dict[str, Any]:
    """What the first rank decided."""
    try:
        found: dict[str, Any] = json.loads(store.get(_START_KEY))
    except RuntimeError as error:
        raise RunError(
            f"waited {seconds:g} s for rank 0 to check the request and take the run directory: {error}"
        ) from error
    return found


def _read_start(found: dict[str, Any]) -> Path | None:
    """The run directory; None when there is nothing left to do."""
    if "error" in found:
        raise (RequestError if found["request"] else RunError)(found["error"])
    return None if "finished" in found else Path(found["run_dir"])


class PrintedProgress:
    """Progress on stderr from inside the rank, where no supervisor looks: a board of one, and a thread that reads it."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
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
