"""The coordinator of a run on several hosts: an agent on each over a remote shell; one display, one culprit, one exit code.

It takes the request that the supervisor of one machine takes (``launch/ranks.py``) and returns the same outcome. Agents start,
watch and end the ranks of their hosts; the coordinator lets them in together, holds the keys by which ranks find each other
(``comm/store``), decides when all must end, and judges. It listens on nothing: everything travels over the remote shell, which
knows both ends. It has one thread and never waits for a single host.
"""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.core.rundir import RunDir
from shoal.launch.forkclient import ForkClient
from shoal.launch.hosts.admission import choose_addresses, folder_problems, same_machine_problems, version_problems
from shoal.launch.hosts.connection import Connection
from shoal.launch.hosts.hostspec import HostSlots
from shoal.launch.hosts.messages import Bye, Enter, Entered, Failed, Hello, Interface, Ping, Pong
from shoal.launch.supervisor import SignalInbox, Supervisor

DEFAULT_SHELL = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""Called with a host and a command in the syntax of ``sh``."""
_OTHERS_SECONDS = 2.0
"""How long other hosts may still say what is wrong with them after one has failed."""
_ENTER_SECONDS = 60.0
_END_SECONDS = 10.0
_TURN_SECONDS = 0.1
_CLOCK_PINGS, _CLOCK_SECONDS = 3, 0.1
_SHELL_ADVICE = "see that `ssh {} true` works without a question, or name another remote shell with --ssh"
_PAUSE_SECONDS = 2.0
"""A coordinator that has not looked for so long was stopped itself: the silence was its own."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The hosts of a run, and how to get there."""

    hosts: tuple[HostSlots, ...]
    """With the number of ranks on each."""
    remote_shell: Sequence[str] = DEFAULT_SHELL
    python: str = ""
    """The interpreter there; this one's path when left out."""
    network: str = ""
    """The interface, or the network, over which ranks talk; left out, the one that leads to the hosts' names."""
    connect_seconds: float = 60.0
    """How long a host may take until its agent is there."""
    optional: frozenset[str] = frozenset()
    """Hosts without which the run can begin; they may come while it goes on."""
    hostfile: Path | None = None
    """The file that named the hosts, where it is read again while the run goes on: one that is new in it may take the place of
    one that was lost."""
    most_per_core: int = 0
    """Ranks that a host runs at most on each core; 0 for any number."""


class Interrupted(Exception):
    """A signal came before a rank was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Coordinator:
    """The lines to all hosts.

    Args:
        fleet: the hosts.
        inbox: signals to this process.
        lease_seconds: how long a host may be silent.
        show: gets lines that agents print.
    """

    def __init__(self, fleet: Fleet, inbox: SignalInbox, *, lease_seconds: float, show: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.inbox = inbox
        self.lease_seconds = lease_seconds
        self.interfaces: dict[str, Interface] = {}
        """By host: how others reach it."""
        self._show = show
        self._supervisor = Supervisor(ForkClient([], {}), environment=dict(os.environ))
        firsts = [sum(host.slots for host in fleet.hosts[:index]) for index in range(len(fleet.hosts))]
        self._run_dir = ""
        self.connections = [
            Connection(host, range(first, first + host.slots)) for host, first in zip(fleet.hosts, firsts, strict=True)
        ]
        self._taken: list[tuple[Connection, Any]] = []
        self._pinged = self._looked = time.monotonic()

    def gather(self) -> None:
        """Start an agent on every host, or on those that were lost, and see that all fit together.

        Raises:
            RequestError: a host cannot be reached or used, or does not fit to the others; names it.
            Interrupted: a signal came.
        """
        missing = self.reach()
        for connection in self.connections:
            if connection.name in self.fleet.optional and (problem := missing.pop(connection.name, None)):
                self._show(f"{problem}; the run begins without it")
                self.lose(connection, problem)
        self._refuse(list(missing.values()))
        hellos = {one.name: one.hello for one in self.connections if one.hello is not None}
        self._refuse(version_problems(hellos))
        self._refuse(same_machine_problems(hellos, list(hellos)))
        self._refuse(self._crowded(hellos))
        self.interfaces = choose_addresses(hellos, network=self.fleet.network)

    def reach(self, *, awaits_all: bool = False) -> dict[str, str]:
        """Start an agent on every host that has none; what is wrong with those that have none then, by host.

        Args:
            awaits_all: give every host its whole time, though another one has failed already.

        Raises:
            RequestError: the remote shell cannot be started.
            Interrupted: a signal came.
        """
        opened = [connection for connection in self.connections if connection.process is None]
        for connection in opened:
            try:
                connection.open(self._supervisor, self.fleet.remote_shell, self.fleet.python)
            except OSError as error:
                raise RequestError(
                    f"the remote shell {self.fleet.remote_shell[0]!r} cannot be started: {error}; "
                    "install it, or name another with --ssh"
                ) from error
            self._watch(connection)
        limit = Deadline(seconds=self.fleet.connect_seconds)
        while any(connection.hello is None and not connection.lost for connection in opened):
            self._turn_or_stop()
            has_failed = any(one.lost for one in opened) and not awaits_all
            if limit.is_over or (has_failed and limit.seconds > _OTHERS_SECONDS):
                # Those that are only slower than the one that failed are not to blame.
                if limit.is_over:
                    break
                limit = Deadline(seconds=min(limit.remaining, _OTHERS_SECONDS))
        return _unreachable(opened, self.fleet.connect_seconds, has_time=limit.seconds > _OTHERS_SECONDS)

    def enter(self, run_dir: str, *, why_shared: str = "") -> None:
        """See that every host has a run directory, and the first host, or all, the one that this process has.

        Raises:
            RequestError: names the host that has not.
            Interrupted: a signal came.
        """
        self._run_dir = run_dir
        token = secrets.token_hex(16)
        path = os.path.join(os.path.abspath(run_dir), f".door-{secrets.token_hex(4)}")
        entered: dict[str, Entered] = {}
        try:
            with open(path, "x", encoding="ascii") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())
            files = (RunDir(Path(run_dir)).recipe, RunDir(Path(run_dir)).plan)
            asked = Enter(
                run_dir=run_dir,
                token_file=path,
                lease_seconds=self.lease_seconds,
                texts={file.name: file.read_text() for file in files if file.exists()},
                mode=stat.S_IMODE(os.stat(run_dir).st_mode),
            )
            asking = [one for one in self.connections if not (one.lost and one.name in self.fleet.optional)]
            for connection in asking:
                connection.send(asked)
            limit = Deadline(seconds=_ENTER_SECONDS)
            while len(entered) < len(asking):
                for connection, message in self._turn_or_stop():
                    if isinstance(message, Entered):
                        entered[connection.name] = message
                self._refuse(list(_gone(asking).values()))
                for connection in asking:
                    if connection.name not in entered and limit.is_over:
                        raise RequestError(
                            f"host {connection.name} did not find {run_dir} within {_ENTER_SECONDS:g} s: does its file "
                            "system answer?"
                        )
        except OSError as error:
            raise RequestError(f"{run_dir} cannot be written to: {error}; use another --run-dir") from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._refuse(folder_problems(run_dir, token, entered, first=self.connections[0].name, why_shared=why_shared))

    def measure_clocks(self) -> dict[str, float]:
        """By host, how far its clock is ahead of this machine's."""
        others: list[tuple[Connection, Any]] = []
        for _ in range(_CLOCK_PINGS):
            for connection in self.connections:
                if connection.hello is not None:
                    connection.send(Ping(sent=time.monotonic(), heard=connection.agent_clock))
            limit = Deadline(seconds=_CLOCK_SECONDS)
            while not limit.is_over:
                others += self.turn(_CLOCK_SECONDS / 5)
        self._taken = others + self._taken
        return {one.name: one.clock_offset for one in self.connections if one.agent_clock >= 0}

    def return_lost(self) -> None:
        """Start agents again on hosts that were lost.

        Raises:
            RunError: one does not come back.
            Interrupted: a signal came.
        """
        if not any(connection.lost for connection in self.connections):
            return
        # A host that was cut off ends its ranks by itself, but not sooner.
        limit = Deadline(seconds=self.lease_seconds)
        while not limit.is_over:
            self._turn_or_stop()
        self.connections = [Connection(one.host, one.ranks) if one.lost else one for one in self.connections]
        try:
            self.gather()
            # What came back has another lease until it is told, and maybe no run directory any more.
            self.enter(self._run_dir)
        except RequestError as error:
            raise RunError(f"the ranks cannot be started again: {error}") from error

    def open_again(self, old: Connection, host: HostSlots | None = None) -> Connection:
        """A new line to a host that is not there, or to another one in its place; it is none of ``connections`` before ``admit``.

        Raises:
            OSError: the remote shell cannot be started.
        """
        connection = Connection(host or old.host, old.ranks)
        connection.open(self._supervisor, self.fleet.remote_shell, self.fleet.python)
        self._watch(connection)
        return connection

    def admit(self, old: Connection, new: Connection) -> None:
        """Put a new line in the place of one that was lost."""
        new.heard = time.monotonic()
        self.connections = [new if one is old else one for one in self.connections]

    def turn(self, seconds: float) -> list[tuple[Connection, Any]]:
        """Wait until something happens, but not longer than that; what agents have said, but for pongs."""
        is_sending = any(connection.has_outgoing for connection in self.connections)
        self._supervisor.turn(min(seconds, 0.01) if is_sending else seconds)
        now = time.monotonic()
        if now - self._looked > _PAUSE_SECONDS:
            for connection in self.connections:
                connection.heard = now
        self._looked = now
        for connection in self.connections:
            connection.flush()
            silent = now - connection.heard
            if connection.hello is not None and not connection.lost and silent > self.lease_seconds:
                self.lose(
                    connection,
                    f"the host gave no sign of life for {silent:.1f} s (elastic.lease_seconds {self.lease_seconds:g})",
                )
        if now - self._pinged > self.lease_seconds / 8:
            self._pinged = now
            for connection in self.connections:
                if connection.hello is not None:
                    connection.send(Ping(sent=now, heard=connection.agent_clock))
        taken, self._taken = self._taken, []
        return taken

    def lose(self, connection: Connection, reason: str) -> None:
        """Give a host up: close its line, at which its agent ends its ranks if it is there."""
        if connection.lost:
            return
        connection.lost = reason
        for descriptor in (connection.reading, connection.errors):
            self._supervisor.unwatch(descriptor)
        connection.hang_up()
        if connection.process is not None and connection.process.is_running:
            self._supervisor.kill([connection.process])

    def close(self) -> None:
        """End all agents, and with them their ranks."""
        for connection in self.connections:
            connection.send(Bye())
        limit = Deadline(seconds=_END_SECONDS)
        while self._supervisor.running and not limit.is_over:
            if any(connection.has_outgoing for connection in self.connections):
                self.turn(_TURN_SECONDS)
                continue
            for connection in self.connections:
                self.lose_quietly(connection)
            self._supervisor.turn(_TURN_SECONDS)
        self._supervisor.close()

    def lose_quietly(self, connection: Connection) -> None:
        """Close the line, and let the shell end by itself."""
        if connection.lost or connection.process is None:
            return
        connection.lost = "it was told to end"
        for descriptor in (connection.reading, connection.errors):
            self._supervisor.unwatch(descriptor)
        connection.hang_up()

    def _watch(self, connection: Connection) -> None:
        self._supervisor.watch(connection.reading, lambda: self._read(connection))
        self._supervisor.watch(connection.errors, lambda: self._read_errors(connection))

    def _read(self, connection: Connection) -> None:
        try:
            messages = connection.read()
        except EOFError:
            self._end(connection)
            return
        except RunError as error:
            self.lose(connection, str(error))
            return
        for message in messages:
            if isinstance(message, Hello):
                connection.hello = message
            elif isinstance(message, Pong):
                _set_clock(connection, message)
            else:
                self._taken.append((connection, message))

    def _read_errors(self, connection: Connection) -> None:
        before = len(connection.tail)
        if not connection.read_errors():
            self._supervisor.unwatch(connection.errors)
        if connection.hello is not None:
            for line in list(connection.tail)[before:]:
                self._show(f"[host {connection.name}] {line}")

    def _end(self, connection: Connection) -> None:
        """The shell has closed its output: it has ended, or does so now."""
        self._supervisor.unwatch(connection.reading)
        if connection.process is not None:
            with contextlib.suppress(TimeoutError):
                connection.process.wait(_OTHERS_SECONDS)
        if self._supervisor.is_watched(connection.errors):
            connection.drain_errors()
        self.lose(connection, connection.describe_end())

    def _turn_or_stop(self) -> list[tuple[Connection, Any]]:
        found = self.turn(_TURN_SECONDS)
        for number in self.inbox.take():
            raise Interrupted(number)
        for connection, message in found:
            if isinstance(message, Failed):
                raise RequestError(f"host {connection.name}: {message.text}")
        return found

    def _crowded(self, hellos: dict[str, Hello]) -> list[str]:
        most = self.fleet.most_per_core
        return [
            f"host {one.name} has {hellos[one.name].cores} core(s), which run {most * hellos[one.name].cores} ranks at most, "
            f"and {len(one.ranks)} are asked for; put fewer there"
            for one in self.connections
            if most and one.name in hellos and len(one.ranks) > most * hellos[one.name].cores
        ]

    @staticmethod
    def _refuse(problems: Sequence[str]) -> None:
        if problems:
            raise RequestError("\n".join(problems))


def _unreachable(connections: Sequence[Connection], seconds: float, *, has_time: bool) -> dict[str, str]:
    found = _gone(connections)
    if found and not has_time:
        return found
    return found | {
        one.name: f"host {one.name}: no agent within {seconds:g} s{': ' + '; '.join(one.tail) if one.tail else ''}; can "
        f"`ssh {one.name} true` be run without a question?"
        for one in connections
        if one.hello is None and not one.lost
    }


def _gone(connections: Sequence[Connection]) -> dict[str, str]:
    return {one.name: f"host {one.name}: {one.lost}; {_advice(one)}" for one in connections if one.lost}


def _advice(connection: Connection) -> str:
    said = connection.lost.lower()
    if "exit code 255" in said:  # ssh's own; what it started there never came to run
        return _SHELL_ADVICE.format(connection.name)
    if "no module named" in said or "no such file" in said or "not found" in said or "can't cd" in said:
        return "install Shoal there at the same path, or name the interpreter with --python"
    if connection.hello is not None:
        return "see its own messages above"
    return _SHELL_ADVICE.format(connection.name)


def _set_clock(connection: Connection, pong: Pong) -> None:
    connection.agent_clock = max(connection.agent_clock, pong.clock)
    round_trip = time.monotonic() - pong.sent
    if round_trip <= connection.round_trip:
        connection.round_trip = round_trip
        connection.clock_offset = pong.now - (time.time() - round_trip / 2)
