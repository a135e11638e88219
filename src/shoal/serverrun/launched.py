"""A run with parameter servers whose processes another launcher starts: each reads its place, and becomes a role of the job.

All of them have one key, which rank 0 makes in the run directory for its owner's eyes only; where it lies, and where the center
listens, they learn from the launcher's store. What a process does then is in ``roles.py``.
"""

import contextlib
import json
import secrets
import shutil
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store  # torch types these names only there

from shoal.comm.network.interface import own_address
from shoal.comm.store.rounds import agree_on_round
from shoal.comm.wire.keys import make_keys
from shoal.comm.world import open_store, seal_store
from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_NO, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.core.rundir import make_run_dir
from shoal.engine.resolve import default_threads
from shoal.serverrun.roles import Meeting, Roles, free_port, list_roles
from shoal.serverrun.standalone import check_server_folder
from shoal.telemetry.summaryfile import read_summary
from shoal.trainer.claim import choose_run_dir
from shoal.trainer.config import Recipe, load_recipe, read_start_deadline
from shoal.trainer.request import TrainRequest, read_request

_ROLES_KEY, _DONE_KEY = "shoal/roles", "shoal/roles-done"
_LOOK_SECONDS = 0.25
_STOP_SECONDS = 10.0


def asks_servers(request: TrainRequest) -> bool:
    """True where a request's plan has parameter servers; False too where it is wrong, which is found out by who runs it."""
    try:
        text = request.plan if request.plan is not None else load_recipe(request.recipe, request.overrides).plan
        return Plan.parse(text).ps > 0
    except RequestError:
        return False


def check_servers(place: Place, *, has_servers: bool) -> None:
    """Refuse a plan without servers where the launcher has processes for some.

    Raises:
        RequestError: gives the number.
    """
    if place.num_servers and not has_servers:
        raise RequestError(
            f"{place.launcher} has {place.num_servers} parameter server(s) among its {place.world_size} processes "
            f"({', '.join(place.evidence)}), and the plan has none; add ps={place.num_servers} to the plan"
        )


def train_as_role(request: TrainRequest, place: Place) -> tuple[int, dict[str, Any] | None]:
    """Be one process of a run with parameter servers; the exit code, and on the first rank the summary.

    Raises:
        RequestError: the request is wrong; told by the first rank, and passed on to the others without words.
        RunError: the first rank could not be reached.
    """
    seconds = read_start_deadline(request.recipe, request.overrides)
    opened = open_store(place, timedelta(seconds=seconds))
    number = agree_on_round(
        opened, rank=place.rank, world_size=place.world_size, host=socket.gethostname(), seconds=seconds
    )
    seal_store()  # All have come.
    # A launcher that starts its processes again keeps what those before have said.
    store = PrefixStore(f"round-{number}", opened)
    if number > 0:
        request = replace(request, resume=True, may_start=True)
    recipe, plan, _ = read_request(request)
    if place.num_servers not in (0, plan.ps):
        raise RequestError(f"{place.launcher} has {place.num_servers} parameter server(s), and the plan ps={plan.ps}")
    if place.rank == 0:
        _open_meeting(request, place, recipe, store)
    meeting = _hear_of_meeting(store, place, seconds)
    if isinstance(meeting, int):
        return meeting, None
    roles = list_roles(request, place, plan, meeting, address=own_address(place) or place.address)
    try:
        code = Roles(roles, recipe, meeting, place).run()
    finally:
        if place.rank == 0:
            _await_others(store, place)
            shutil.rmtree(Path(meeting.key).parent, ignore_errors=True)
        else:
            with contextlib.suppress(RuntimeError):
                store.add(_DONE_KEY, 1)
    return code, read_summary(Path(meeting.run_dir)) if place.rank == 0 else None


def _open_meeting(request: TrainRequest, place: Place, recipe: Recipe, store: Store) -> None:
    """Check the run directory, make the key, and tell the others; they must hear of a refusal too, or they would wait."""
    try:
        resume = request.resume or place.generation > 0
        run_dir = choose_run_dir(request.recipe.stem, given=request.run_dir, resume=resume).resolve()
        check_server_folder(run_dir, recipe, resume=resume)
        make_run_dir(run_dir, recipe.run.readable_by)
        folder = run_dir / f".roles-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        make_keys(folder / "key")
        host = own_address(place) or place.address
        meeting = {
            "run_dir": str(run_dir),
            "key": str(folder / "key"),
            "center": f"tcp://{host}:{free_port(host)}",
            "threads": recipe.train.threads or default_threads(place.local_size or place.world_size),
        }
    except Exception as error:
        store.set(_ROLES_KEY, json.dumps({"refused": isinstance(error, RequestError)}))
        raise
    store.set(_ROLES_KEY, json.dumps(meeting))


def _hear_of_meeting(store: Store, place: Place, seconds: float) -> Meeting | int:
    """What rank 0 told, or the exit code where it has refused the request."""
    try:
        found = json.loads(store.get(_ROLES_KEY))
    except RuntimeError as error:
        raise RunError(f"rank {place.rank} waited {seconds:g} s for rank 0 to check the request: {error}") from error
    if "refused" in found:
        return EXIT_WRONG_REQUEST if found["refused"] else EXIT_NO
    meeting = Meeting(**found)
    if not Path(meeting.key).exists():
        raise RunError(
            f"rank {place.rank} does not find {meeting.key}, which rank 0 has made: with parameter servers all hosts "
            "need one run directory; give --run-dir on a file system that they share"
        )
    return meeting


def _await_others(store: Store, place: Place) -> None:
    """Serve the store until the others have ended, for a while: one that is still starting must not find nobody."""
    limit = Deadline(seconds=_STOP_SECONDS)
    with contextlib.suppress(RuntimeError):
        while store.add(_DONE_KEY, 0) < place.world_size - 1 and not limit.is_over:
            time.sleep(_LOOK_SECONDS)
