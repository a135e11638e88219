"""The agent of one host of a run: it starts the ranks of this host, watches them and ends them, and tells the coordinator.

The coordinator starts it over a remote shell, as ``python -m shoal.launch.hosts.agent``, and talks to it on its standard input
and output. It imports no torch. When the coordinator, the shell or the network between them is gone, it ends its ranks: at the
end of its input at once, by silence after the lease.
"""

import contextlib
import json
import os
import platform
import queue
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.comm.network.interface import list_interfaces
from shoal.core.config import validate
from shoal.core.errors import EXIT_DONE, EXIT_NO, RequestError, ShoalError
from shoal.core.rundir import RunDir, replace_text
from shoal.launch.blame import RankEnd
from shoal.launch.config import ProcessConfig
from shoal.launch.forkclient import ForkClient
from shoal.launch.group.request import LaunchRequest
from shoal.launch.hosts.digest import code_digest
from shoal.launch.hosts.link import Link, Work
from shoal.launch.hosts.messages import (
    MAGIC,
    Bye,
    Ended,
    Enter,
    Entered,
    Failed,
    GenerationEnded,
    Hello,
    Interface,
    Listen,
    Output,
    Probe,
    Reading,
    Start,
    Status,
)
from shoal.launch.hosts.probe import listen, probe
from shoal.launch.hosts.remotegroup import RemoteGroup
from shoal.launch.ranks import Generation, fork_client
from shoal.launch.supervisor import SignalInbox
from shoal.telemetry.statusboard import StatusReading

_LOOK_SECONDS = 0.1
_MOST_TOKEN = 4096


def describe_host() -> Hello:
    """What the coordinator compares with other hosts."""
    return Hello(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        shoal=_version("shoal"),
        torch=_version("torch"),
        code=code_digest(),
        cores=_num_cores(),
        interfaces=tuple(Interface(name=name, address=address) for name, address in list_interfaces()),
        # "client port server port"
        shell_address=(os.environ.get("SSH_CONNECTION", "").split() or ["", "", "", ""])[2],
    )


class LinkDisplay:
    """Sends what a supervisor shows to the coordinator, which has the screen."""

    def __init__(self, link: Link, generation: int, ranks: Sequence[int]) -> None:
        self._link = link
        self._generation = generation
        self._ranks = ranks
        self._sent: tuple[Any, ...] = ()

    def update(self, states: Sequence[StatusReading]) -> None:
        """Send where the ranks of this host are."""
        readings = tuple(_read(states[rank]) for rank in self._ranks)
        self._link.send(Status(generation=self._generation, readings=readings), can_drop=True)

    def message(self, text: str) -> None:
        """Send lines."""
        self._link.send(Output(text=text), can_drop=True)

    def close(self) -> None:
        """Nothing is left open."""


class LinkOutput:
    """Sends what ranks print to their standard output."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def write(self, text: str) -> int:
        """Send text; a line ends elsewhere."""
        if text != "\n":
            self._link.send(Output(text=text, is_stdout=True), can_drop=True)
        return len(text)

    def flush(self) -> None:
        """Everything is sent at once."""


class Agent:
    """The agent: does what the coordinator asks, one thing after the other, until there is nothing more."""

    def __init__(self, link: Link, inbox: SignalInbox) -> None:
        self._link = link
        self._inbox = inbox
        self._client: ForkClient | None = None

    def run(self) -> None:
        """Serve until the coordinator is done or gone, or a signal asks to stop while no rank runs."""
        try:
            while not self._link.lost:
                work = self._next()
                if isinstance(work, Enter):
                    self._link.send(enter(work))
                elif isinstance(work, Start):
                    self._start(work)
                elif isinstance(work, Listen):
                    self._link.send(listen(work.address, work.token, work.seconds))
                elif isinstance(work, Probe):
                    self._link.send(probe(work.address, work.port, work.token, work.seconds))
                else:
                    return
        finally:
            if self._client is not None:
                self._client.close()

    def _next(self) -> Work:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._link.work.get(timeout=_LOOK_SECONDS)
            if self._inbox.take():
                return Bye()

    def _start(self, start: Start) -> None:
        try:
            request = self._request(start)
            if self._client is None:
                self._client = fork_client(request)
            self._inbox.take()  # what was ordered of ranks before
            end = Generation(request, start.generation, self._inbox, self._client).run()
            self._link.send(GenerationEnded(generation=start.generation, end=end))
        except ShoalError as error:
            self._link.send(Failed(text=str(error), is_request=isinstance(error, RequestError)))

    def _request(self, start: Start) -> LaunchRequest:
        def tell(end: RankEnd) -> None:
            self._link.send(Ended(generation=start.generation, end=end))

        threads = start.threads or max(1, _num_cores() // len(start.ranks))
        return LaunchRequest(
            argv=start.argv,
            module=start.module,
            arguments=start.arguments,
            shared=start.shared,
            num_ranks=start.num_ranks,
            ranks=start.ranks,
            run_dir=Path(start.run_dir),
            run_id=start.run_id,
            display=LinkDisplay(self._link, start.generation, start.ranks),
            config=validate(ProcessConfig, json.loads(start.config), origin="the coordinator"),
            last_step=start.last_step,
            threads=threads,
            env={**start.env, "SHOAL_STORE": self._link.store.path},
            descriptors=(self._link.store.descriptor,),
            on_end=tell,
            build_group=(lambda: RemoteGroup(self._link, start)) if start.members else None,
        )


def enter(asked: Enter) -> Entered:
    """Look at the run directory from this host, and make one where there is none that is shared."""
    root = Path(asked.run_dir)
    try:
        with Path(asked.token_file).open(encoding="ascii") as file:
            token = file.read(_MOST_TOKEN)
    except (OSError, UnicodeDecodeError):
        token = ""
    try:
        if not token:
            root.mkdir(mode=asked.mode, parents=True, exist_ok=True)
            for path in (RunDir(root).recipe, RunDir(root).plan):
                if path.name in asked.texts:
                    replace_text(path, asked.texts[path.name])
    except OSError as error:
        return Entered(problem=f"it cannot be made ({error})")
    if not os.access(root, os.W_OK | os.X_OK):
        return Entered(token=token, problem="this user cannot write there")
    return Entered(token=token)


def _read(state: StatusReading) -> Reading:
    age = -1.0 if state.heartbeat is None else max(0.0, time.monotonic() - state.heartbeat)
    return Reading(
        rank=state.rank,
        pid=state.pid,
        age=age,
        step=state.step,
        phase=state.phase,
        phase_count=state.phase_count,
        metrics=json.dumps(dict(state.metrics), default=str),
        final_status=state.final_status,
        stop_signal=state.stop_signal,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Be the agent of this host."""
    # What anything prints here must not get between messages.
    writing = os.dup(1)
    os.dup2(2, 1)
    reading = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.write(writing, MAGIC)
    with SignalInbox() as inbox:
        link = Link(reading, writing, inbox)
        link.start()
        link.send(describe_host())
        Agent(link, inbox).run()
        link.close()
    reason = link.lost
    if reason != "the agent is done":
        print(f"shoal agent on {socket.gethostname()}: {reason}; all ranks here were ended", file=sys.stderr)
    sys.stderr.flush()
    # Not sys.exit: nothing that still runs may keep an agent alive whose coordinator is gone.
    os._exit(EXIT_DONE if reason == "the agent is done" else EXIT_NO)


if __name__ == "__main__":
    main()
