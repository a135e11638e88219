"""The ranks of one node, where a cluster starts one process for each node: a pod of Kubernetes with several devices.

The pod knows its index; each rank is told its number on the node beside it, and reads its place from both. One rank's death ends
the others of the node, and the exit code is that of the first that failed.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_DONE, EXIT_NO, RequestError, RunError
from shoal.launch.blame import name_signal
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import KILL_SECONDS, Command, SignalInbox, Supervisor

_LOOK_SECONDS = 0.2
_COLLECT_SECONDS = 5.0
"""How long the others may still say what they saw after one rank has failed."""
SIGNS = ("JOB_COMPLETION_INDEX", "WORKER_INDEX")
"""Variables with the index of a node."""
_KUBEFLOW = "PET_NODE_RANK"
"""The same where the cluster gives the size and the address by itself."""


def check_node(environment: Mapping[str, str], per_node: int) -> None:
    """Refuse to start the ranks of a node that is none of a cluster's.

    Raises:
        RequestError: names what is missing.
    """
    if _KUBEFLOW in environment:
        given = environment.get("PET_NPROC_PER_NODE", str(per_node))
        if given.isdigit() and int(given) not in (1, per_node):
            raise RequestError(f"--per-node {per_node}: the job says PET_NPROC_PER_NODE={given}; change one of them")
        return
    if not any(sign in environment for sign in SIGNS):
        raise RequestError(
            f"--per-node {per_node} without --on starts the ranks of a node whose index a cluster gives in "
            f"{', '.join(SIGNS)} or {_KUBEFLOW}, and none is set; to start ranks on this machine alone, use --nproc {per_node}"
        )
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR") if name not in environment]
    if missing:
        raise RequestError(f"--per-node {per_node}: the job's file sets no {' and no '.join(missing)}")
    size = environment["WORLD_SIZE"]
    if not size.isdigit() or int(size) % per_node:
        raise RequestError(f"--per-node {per_node}: WORLD_SIZE={size} is no multiple of it; change one of them")


def run_local_ranks(arguments: Sequence[str], per_node: int, *, stop_grace: float) -> int:
    """Start ``shoal ARGUMENTS`` as the ranks of this node, and stay until all have ended; the exit code.

    Raises:
        RunError: one could not be started, or this is not the main thread.
    """
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(per_node), "SHOAL_SUPERVISOR_PID": str(os.getpid())}
    client = ForkClient([], environment)
    with SignalInbox() as inbox, contextlib.closing(client):
        supervisor = Supervisor(client, environment=environment)
        try:
            return _watch(supervisor, inbox, arguments, per_node, stop_grace)
        finally:
            supervisor.close()


def _watch(
    supervisor: Supervisor, inbox: SignalInbox, arguments: Sequence[str], per_node: int, stop_grace: float
) -> int:
    for local in range(per_node):
        command = Command(
            name=f"local rank {local}",
            module="shoal",
            arguments=arguments,
            environment={"LOCAL_RANK": str(local)},
            is_forked=False,
        )
        try:
            supervisor.start(command, Streams(stdout=sys.stdout.fileno(), stderr=sys.stderr.fileno()))
        except OSError as error:
            raise RunError(f"cannot start {command.name} of {per_node}: {error}") from error
    stop = _Stop(supervisor, inbox, stop_grace)
    supervisor.watch(inbox, stop.take)
    failed: Process | None = None
    while supervisor.running:
        for process in supervisor.turn(_LOOK_SECONDS):
            if process.exit_code != EXIT_DONE and failed is None and not stop.is_asked:
                failed = process
                stop.give(_COLLECT_SECONDS)
            elif failed is None and process.exit_code != EXIT_DONE:
                failed = process
        stop.mind()
    return EXIT_DONE if failed is None else _exit_code(failed)


def _exit_code(process: Process) -> int:
    code = process.exit_code
    assert code is not None
    if code >= 0:
        return code
    print(f"error: {process.name} of this node was killed by {name_signal(-code)}", file=sys.stderr, flush=True)
    return EXIT_NO


class _Stop:
    """Ends what is left when its time is over."""

    def __init__(self, supervisor: Supervisor, inbox: SignalInbox, grace: float) -> None:
        self._supervisor = supervisor
        self._inbox = inbox
        self._grace = grace
        self._deadline: Deadline | None = None
        self.is_asked = False

    def take(self) -> None:
        """Pass a signal on, once."""
        if self._inbox.take() and not self.is_asked:
            self.is_asked = True
            self.give(self._grace)
            for process in self._supervisor.running:
                process.send(signal.SIGTERM)

    def give(self, seconds: float) -> None:
        """Those that run have so long."""
        self._deadline = Deadline(seconds=seconds)

    def mind(self) -> None:
        """Kill what is left when the time is over."""
        if self._deadline is not None and self._deadline.is_over:
            self._supervisor.kill()
            self._deadline = Deadline(seconds=KILL_SECONDS)
