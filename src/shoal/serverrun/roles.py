"""The roles of one process of a run with parameter servers that somebody else started: a launcher, or the agent of a host.

The first ranks are servers and the others workers, in the order of their numbers; the process of rank 0 starts the center beside
its server. Each role is a child of its process: one that dies is started again, and a signal to stop becomes a word to the
center, by which every role ends after what is under way.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RunError, ShoalError
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.launch.blame import EXIT_INTERRUPTED, name_signal
from shoal.launch.environments import inherited
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import KILL_SECONDS, Command, SignalInbox, Supervisor
from shoal.serverrun.cluster import read_cluster
from shoal.serverrun.standalone import stop_run
from shoal.trainer.config import Recipe
from shoal.trainer.request import TrainRequest

_LOOK_SECONDS = 0.25
_STOP_SECONDS = 10.0
_LAST_SECONDS = 30.0
"""How long a center may take to end after its server has."""
_REFUSED_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What all processes of the run have to know, told by rank 0."""

    run_dir: str
    key: str
    """The file with the key of all roles."""
    center: str
    threads: int
    is_held: bool = False
    """Somebody else holds the run directory, and tells the end of the run."""


@dataclass(frozen=True, kw_only=True)
class RoleCommand:
    """What one role of this process runs."""

    name: str
    arguments: tuple[str, ...]
    """Of ``shoal``."""
    again: tuple[str, ...] = ()
    """Further ones when it is started again."""
    is_center: bool = False


def list_roles(request: TrainRequest, place: Place, plan: Plan, meeting: Meeting, *, address: str) -> list[RoleCommand]:
    """The roles of a rank, which others reach at an address: a server or a worker, and beside the first server the center.

    Pure.
    """
    settings = [*request.overrides, f"train.threads={meeting.threads}"]
    common = [str(request.recipe), "--plan", str(plan), *(word for one in settings for word in ("--set", one))]
    common += ["--centers", meeting.center, "--keys", meeting.key]
    if place.rank >= plan.ps:
        index = place.rank - plan.ps
        words = ("role", "worker", *common, "--index", str(index))
        return [RoleCommand(name=f"worker-{index}", arguments=words)]
    words = ("role", "server", *common, "--index", str(place.rank), "--listen", f"tcp://{address}:0")
    words += ("--run-dir", meeting.run_dir, *(["--supervised"] if meeting.is_held else []))
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


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


class Roles:
    """The roles of this process, until they have ended.

    Args:
        roles: what to start.
        recipe: of the run.
        meeting: where the center is, and the key.
        place: of this process.
    """

    def __init__(
        self,
        roles: Sequence[RoleCommand],
        recipe: Recipe,
        meeting: Meeting,
        place: Place,
    ) -> None:
        self._roles = {role.name: role for role in roles}
        self._recipe = recipe
        self._meeting = meeting
        self._place = place
        self._respawns = recipe.paramserver.max_respawns
        self.stop_signal: int | None = None
        """The first one that came."""
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
                # Held back until there was somebody to hear it, where a fork server started this process.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
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
        if self.stop_signal is not None and code in (EXIT_INTERRUPTED, EXIT_DONE):
            return 128 + self.stop_signal if code == EXIT_INTERRUPTED else EXIT_DONE
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
        if code < 0 and self.stop_signal is None and self._code is None and self._respawns > 0:
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
            # A role whose request is wrong was never in the run: nobody waits for its center.
            self._deadline = Deadline(seconds=_REFUSED_SECONDS if code == EXIT_WRONG_REQUEST else _LAST_SECONDS)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if self.stop_signal is not None:
                continue
            self.stop_signal = number
            self._deadline = Deadline(seconds=self._recipe.elastic.stop_grace)
            if self._place.rank == 0:
                self._stop_run(number)

    def _stop_run(self, number: int) -> None:
        """Tell the center, which tells all roles. The other processes got the signal too, and wait for that."""
        keys = Path(self._meeting.key)
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
    return {**inherited(environment), "SHOAL_LAUNCHER": "off"}
