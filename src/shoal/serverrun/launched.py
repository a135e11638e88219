"""A run with parameter servers whose processes another launcher starts: each reads its place, and becomes a role of the job.

The first ranks are servers and the others workers, in the order of their numbers; the process of rank 0 starts the center beside
its server. All of them have one key, which rank 0 makes in the run directory for its owner's eyes only; where it lies, and where
the center listens, they learn from the launcher's store. Each role is a child of its process: one that dies is started again, and
a signal to stop becomes a word to the center, by which every role ends after what is under way.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store  # torch types these names only there

from shoal.comm.interface import own_address
from shoal.comm.store.rounds import agree_on_round
from shoal.comm.wire.keys import make_keys
from shoal.comm.world import open_store
from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RequestError, RunError, ShoalError
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.core.rundir import make_run_dir
from shoal.engine.resolve import default_threads
from shoal.launch.blame import EXIT_INTERRUPTED, name_signal
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import KILL_SECONDS, Command, SignalInbox, Supervisor
from shoal.serverrun.cluster import read_cluster
from shoal.serverrun.standalone import check_server_folder, stop_run
from shoal.telemetry.summaryfile import read_summary
from shoal.trainer.claim import choose_run_dir
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.request import TrainRequest, read_request

_START_DEADLINE = timedelta(seconds=120)
_ROLES_KEY, _DONE_KEY = "shoal/roles", "shoal/roles-done"
_LOOK_SECONDS = 0.25
_STOP_SECONDS = 10.0
_LAST_SECONDS = 30.0
"""How long a center may take to end after its server has."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What all processes of the run have to know, told by rank 0."""

    run_dir: str
    folder: str
    """With the key; removed at the end of the run."""
    center: str
    threads: int


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
    opened, seconds = open_store(place, _START_DEADLINE), _START_DEADLINE.total_seconds()
    number = agree_on_round(
        opened, rank=place.rank, world_size=place.world_size, host=socket.gethostname(), seconds=seconds
    )
    # A launcher that starts its processes again keeps what those before have said.
    store = PrefixStore(f"round-{number}", opened)
    if number > 0:
        request = replace(request, resume=True, may_start=True)
    recipe, plan, _ = read_request(request)
    if place.num_servers not in (0, plan.ps):
        raise RequestError(f"{place.launcher} has {place.num_servers} parameter server(s), and the plan ps={plan.ps}")
    if place.rank == 0:
        _open_meeting(request, place, recipe, store)
    meeting = _hear_of_meeting(store, place)
    if isinstance(meeting, int):
        return meeting, None
    roles = list_roles(request, place, plan, meeting)
    try:
        code = _Roles(roles, recipe, meeting, place).run()
    finally:
        if place.rank == 0:
            _await_others(store, place)
            shutil.rmtree(meeting.folder, ignore_errors=True)
        else:
            with contextlib.suppress(RuntimeError):
                store.add(_DONE_KEY, 1)
    return code, read_summary(Path(meeting.run_dir)) if place.rank == 0 else None


@dataclass(frozen=True, kw_only=True)
class RoleCommand:
    """What one role of this process runs."""

    name: str
    arguments: tuple[str, ...]
    """Of ``shoal``."""
    again: tuple[str, ...] = ()
    """Further ones when it is started again."""
    is_center: bool = False


def list_roles(request: TrainRequest, place: Place, plan: Plan, meeting: Meeting) -> list[RoleCommand]:
    """The roles of a rank: a server or a worker, and beside the first server the center. Pure."""
    settings = [*request.overrides, f"train.threads={meeting.threads}"]
    common = [str(request.recipe), "--plan", str(plan), *(word for one in settings for word in ("--set", one))]
    common += ["--centers", meeting.center, "--keys", f"{meeting.folder}/key"]
    if place.rank >= plan.ps:
        index = place.rank - plan.ps
        words = ("role", "worker", *common, "--index", str(index))
        return [RoleCommand(name=f"worker-{index}", arguments=words)]
    where = own_address(place) or place.address
    words = ("role", "server", *common, "--index", str(place.rank), "--listen", f"tcp://{where}:0")
    words += ("--run-dir", meeting.run_dir)
    is_resumed = request.resume or place.generation > 0
    server = RoleCommand(
        name=f"server-{place.rank}",
        arguments=(*words, *(["--resume"] if is_resumed else [])),
        again=() if is_resumed else ("--resume",),
    )
    if place.rank > 0:
        return [server]
    center = ("role", "center", *common, "--listen", meeting.center, "--run-dir", meeting.run_dir)
    return [RoleCommand(name="center-0", arguments=center, is_center=True), server]


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
            "folder": str(folder),
            "center": f"tcp://{host}:{_free_port(host)}",
            "threads": recipe.train.threads or default_threads(place.local_size or place.world_size),
        }
    except Exception as error:
        store.set(_ROLES_KEY, json.dumps({"refused": isinstance(error, RequestError)}))
        raise
    store.set(_ROLES_KEY, json.dumps(meeting))


def _hear_of_meeting(store: Store, place: Place) -> Meeting | int:
    """What rank 0 told, or the exit code where it has refused the request."""
    try:
        found = json.loads(store.get(_ROLES_KEY))
    except RuntimeError as error:
        seconds = _START_DEADLINE.total_seconds()
        raise RunError(f"rank {place.rank} waited {seconds:g} s for rank 0 to check the request: {error}") from error
    if "refused" in found:
        return EXIT_WRONG_REQUEST if found["refused"] else EXIT_NO
    meeting = Meeting(**found)
    if not Path(meeting.folder, "key").exists():
        raise RunError(
            f"rank {place.rank} does not find {meeting.folder}/key, which rank 0 has made: with parameter servers all hosts "
            "need one run directory; give --run-dir on a file system that they share"
        )
    return meeting


def _await_others(store: Store, place: Place) -> None:
    """Serve the store until the others have ended, for a while: one that is still starting must not find nobody."""
    limit = Deadline(seconds=_STOP_SECONDS)
    with contextlib.suppress(RuntimeError):
        while store.add(_DONE_KEY, 0) < place.world_size - 1 and not limit.is_over:
            time.sleep(_LOOK_SECONDS)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


class _Roles:
    """The roles of this process, until they have ended."""

    def __init__(self, roles: Sequence[RoleCommand], recipe: Recipe, meeting: Meeting, place: Place) -> None:
        self._roles = {role.name: role for role in roles}
        self._recipe = recipe
        self._meeting = meeting
        self._place = place
        self._respawns = recipe.paramserver.max_respawns
        self._stop_signal: int | None = None
        self._deadline: Deadline | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Start them and stay; the exit code."""
        environment = {
            **_without_launcher(os.environ),
            "SHOAL_SUPERVISOR_PID": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        client = ForkClient([], environment)
        # mpirun hands this one on, and no other by which its processes would have time.
        signal.signal(signal.SIGUSR2, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
        with SignalInbox() as inbox, contextlib.closing(client):
            self._supervisor = Supervisor(client, environment=environment)
            self._inbox = inbox
            try:
                for role in self._roles.values():
                    self._start(role)
                self._supervisor.watch(inbox, self._take_signals)
                while self._supervisor.running:
                    for process in self._supervisor.turn(_LOOK_SECONDS):
                        self._notice_end(process)
                    if self._deadline is not None and self._deadline.is_over:
                        self._supervisor.kill()
                        self._deadline = Deadline(seconds=KILL_SECONDS)
            finally:
                self._supervisor.close()
        code = EXIT_NO if self._code is None else self._code
        if self._stop_signal is not None and code in (EXIT_INTERRUPTED, EXIT_DONE):
            return 128 + self._stop_signal if code == EXIT_INTERRUPTED else EXIT_DONE
        return 128 + signal.SIGTERM if code == EXIT_INTERRUPTED else code

    def _start(self, role: RoleCommand) -> None:
        command = Command(name=role.name, module="shoal", arguments=role.arguments, is_forked=False)
        try:
            with _ignored_signals():
                self._supervisor.start(command, Streams(stdout=sys.stdout.fileno(), stderr=sys.stderr.fileno()))
        except OSError as error:
            raise RunError(f"cannot start {role.name}: {error}") from error

    def _notice_end(self, process: Process) -> None:
        role, code = self._roles[process.name], process.exit_code
        assert code is not None
        if code < 0 and self._stop_signal is None and self._code is None and self._respawns > 0:
            self._respawns -= 1
            print(
                f"{role.name} (rank {self._place.rank} on {socket.gethostname()}) was killed by {name_signal(-code)}; it is "
                f"started again, {self._respawns} times left",
                file=sys.stderr,
                flush=True,
            )
            role = self._roles[role.name] = replace(role, arguments=(*role.arguments, *role.again), again=())
            self._start(role)
            return
        if code < 0:
            said = f"error: {role.name} (rank {self._place.rank} on {socket.gethostname()}) was killed by {name_signal(-code)}"
            print(said, file=sys.stderr, flush=True)
            code = EXIT_NO
        if not role.is_center or (code != EXIT_DONE and self._code is None):
            self._code = code
        if self._deadline is None and (not role.is_center or code not in (EXIT_DONE, EXIT_INTERRUPTED)):
            self._deadline = Deadline(seconds=_LAST_SECONDS)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if self._stop_signal is not None:
                continue
            self._stop_signal = number
            self._deadline = Deadline(seconds=self._recipe.elastic.stop_grace)
            if self._place.rank == 0:
                self._stop_run(number)

    def _stop_run(self, number: int) -> None:
        """Tell the center, which tells all roles. The other processes got the signal too, and wait for that."""
        keys = Path(self._meeting.folder, "key")
        cluster = read_cluster(centers=self._meeting.center, keys=keys)
        reason = signal.Signals(number).name
        try:
            asyncio.run(stop_run(cluster, reason=reason, seconds=_STOP_SECONDS))
        except ShoalError as error:
            print(f"{reason}: {error}; the roles are ended without a checkpoint", file=sys.stderr, flush=True)
            self._supervisor.kill()


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    """A role is asked to stop by the center; what a launcher sends to all processes of a job would make it leave at once."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """A role starts by itself: it is nobody's rank."""
    return {**environment, "SHOAL_LAUNCHER": "off"}
