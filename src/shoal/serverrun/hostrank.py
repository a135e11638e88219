"""One process of a run with parameter servers on several hosts (``shoal train --hosts``): the agent of its host started it.

Where the center listens and the key by which all roles know each other come over the store, which the coordinator serves over the
remote shell: the key is on no disk, and on each host in memory that its owner alone can read.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from shoal.comm.network.interface import VARIABLE, list_interfaces
from shoal.comm.store.agentstore import AgentStore
from shoal.comm.wire.keys import make_keys
from shoal.core.config import read_toml, validate
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RequestError, RunError
from shoal.core.place import Place
from shoal.core.rundir import RunDir, withhold
from shoal.engine.resolve import default_threads
from shoal.launch.blame import EXIT_INTERRUPTED
from shoal.launch.environments import attach_status, read_place
from shoal.launch.failures import report_failure
from shoal.serverrun.roles import Meeting, Roles, free_port, list_roles
from shoal.telemetry.statusboard import Heartbeat, unnamed_file
from shoal.trainer.claim import read_setup
from shoal.trainer.config import Recipe
from shoal.trainer.request import TrainRequest

LISTENS_BY_ITSELF = True
"""SIGTERM is held back until the roles are started (``launch/child.py``)."""
_MEETING_KEY = "shoal/roles"


def main() -> None:
    """Be a role of the run in the run directory that the command line names."""
    # The supervisor asks a rank that hangs for its stacks before it ends it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    run_dir = Path(sys.argv[1])
    try:
        code = _serve(run_dir, resume="--resume" in sys.argv[2:])
    except BaseException as error:
        report_failure(run_dir, error, os.environ)
        _end(EXIT_WRONG_REQUEST if isinstance(error, RequestError) else EXIT_NO)
    _end(code)


def _serve(run_dir: Path, *, resume: bool) -> int:
    run = RunDir(run_dir)
    recipe = validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    withhold(recipe.run.readable_by)
    plan, place = read_setup(run_dir).plan, read_place(os.environ)
    resume = resume or place.generation > 0
    request = TrainRequest(recipe=run.recipe, plan=str(plan), run_dir=run_dir, resume=resume)
    address = _address(os.environ.get(VARIABLE, ""))
    status = attach_status(os.environ)
    with contextlib.ExitStack() as stack:
        if status is not None:
            stack.enter_context(Heartbeat(status))
            status.enter("wait: the key of rank 0", 0)
        meeting = _meet(place, run_dir, address, recipe)
        roles = list_roles(request, place, plan, meeting, address=address)
        if status is not None:
            status.enter(f"role: {roles[-1].name}", 0)
        runner = Roles(roles, recipe, meeting, place)
        code = runner.run()
    if code not in (EXIT_DONE, *_stopped(runner)):
        kind = RequestError if code == EXIT_WRONG_REQUEST else RunError
        raise kind(f"{roles[-1].name} ended with exit code {code}; what it said stands above")
    if status is not None:
        status.finish("completed" if code == EXIT_DONE else "interrupted", stop_signal=runner.stop_signal or 0)
    return EXIT_DONE if code == EXIT_DONE else EXIT_INTERRUPTED


def _stopped(runner: Roles) -> set[int]:
    """Exit codes of roles that were stopped in order: by a signal to this process, or by the center alone."""
    return {128 + (runner.stop_signal or signal.SIGTERM)}


def _meet(place: Place, run_dir: Path, address: str, recipe: Recipe) -> Meeting:
    """Learn where the center is, and the key; rank 0 makes both."""
    store = AgentStore(place.store)
    seconds = recipe.elastic.start_deadline
    store.set_timeout(timedelta(seconds=seconds))
    if place.rank == 0:
        threads = int(os.environ.get("SHOAL_THREADS", "0")) or default_threads(place.local_size or place.world_size)
        told = {
            "key": _new_key(),
            "center": f"tcp://{address}:{free_port(address)}",
            "threads": recipe.train.threads or threads,
        }
        store.set(_MEETING_KEY, json.dumps(told))
    try:
        told = json.loads(store.get(_MEETING_KEY))
    except RuntimeError as error:
        raise RunError(
            f"rank {place.rank} waited {seconds:g} s for rank 0 to tell where the center is: {error}"
        ) from error
    key = _keep(told["key"])
    return Meeting(run_dir=str(run_dir), key=key, center=told["center"], threads=told["threads"], is_held=True)


def _new_key() -> str:
    with tempfile.TemporaryDirectory(prefix="shoal-key-") as folder:
        make_keys(Path(folder) / "key")
        return (Path(folder) / "key").read_text()


def _keep(key: str) -> str:
    """Put a key where the roles of this process find it and nothing is left of it, however this process ends."""
    descriptor = unnamed_file("shoal-key")
    os.fchmod(descriptor, 0o600)
    with os.fdopen(os.dup(descriptor), "w") as file:
        file.write(key)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _address(interface: str) -> str:
    """The address by which other hosts reach this one: that of the interface that the coordinator chose."""
    found = next((address for name, address in list_interfaces() if name == interface), None)
    if found is None:
        raise RunError(f"the interface {interface!r} of this host has no IPv4 address any more; look at its network")
    return found


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: what still runs must not keep a process alive whose peers wait for its end.
    os._exit(code)


if __name__ == "__main__":
    main()
