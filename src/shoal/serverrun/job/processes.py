"""Starts the processes of a job, forked where the system can hand orphans over, else one interpreter each.

No torch. Every process is the job's own child: it is seen to die at once, with its exit code, and it dies with the job.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.core.errors import EXIT_DONE
from shoal.launch.blame import name_signal
from shoal.launch.config import ProcessConfig
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient, ForkedProcess, Streams, kill_group
from shoal.launch.hangs import Hang, Watched, find_hang
from shoal.telemetry.statusboard import StatusReading

_WARM = ("shoal.serverrun.job.role", PRELOAD_OPTIMIZER)


class WatchedChild:
    """A forked process, as an event loop sees it."""

    def __init__(self, process: ForkedProcess, on_end: Callable[[], None]) -> None:
        self.pid = process.pid
        self._process = process
        self._on_end = on_end
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(process.pid)
        self._loop.add_reader(self._descriptor, self._reap)

    @property
    def returncode(self) -> int | None:
        """The exit code as ``subprocess`` gives it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; the exit code."""
        await self._ended.wait()
        return self._process.wait()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._process.wait()
        self._ended.set()
        self._on_end()


Started = WatchedChild | asyncio.subprocess.Process
"""A process of the job."""


class Spawner:
    """See the module.

    Args:
        environment: of every process.
        descriptors: open files that they inherit.
    """

    def __init__(self, environment: Mapping[str, str], *, descriptors: Sequence[int]) -> None:
        self._environment = dict(environment)
        self._descriptors = tuple(descriptors)
        self._client = ForkClient(_WARM, self._environment)
        self._watchers: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def open(self) -> None:
        """Begin to import what roles need; what is started meanwhile waits for it."""
        self._client.open()

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        on_end: Callable[[], None],
        is_forked: bool = True,
    ) -> Started:
        """Start ``python -m module arguments``, with its output in ``log``.

        Args:
            module: has a ``main``.
            arguments: of its command line.
            log: is appended to.
            on_end: called when it has ended.
            is_forked: False for what needs no torch, and is sooner there by itself.
        """
        with log.open("ab", buffering=0) as output:
            forked = await self._fork(module, arguments, output.fileno()) if is_forked else None
            if forked is not None:
                return _watch(forked, on_end)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shoal.launch.child",
                module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self._descriptors,
                env=self._environment,
            )
        task = asyncio.get_running_loop().create_task(_tell_end(process, on_end))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        return process

    async def close(self) -> None:
        """End the nursery, and adopt orphans no longer. What was started is the caller's."""
        for task in list(self._watchers):
            task.cancel()
        async with self._lock:
            self._client.close()

    async def _fork(self, module: str, arguments: Sequence[str], output: int) -> ForkedProcess | None:
        """A new process from the nursery; None when there is none to be had."""
        async with self._lock:
            forking = asyncio.ensure_future(asyncio.to_thread(self._start_forked, module, arguments, output))
            try:
                process = await asyncio.shield(forking)
            except asyncio.CancelledError:
                # The thread goes on, and the file must be open until it is done; what it starts is nobody's.
                self._client.abandon()
                process = await forking
                if process is not None:
                    process.kill()
                    process.wait()
                raise
            # Where one died, another is tried for those that come later; from this thread, with which it is to die.
            if process is None:
                self._client.open()
            return process

    def _start_forked(self, module: str, arguments: Sequence[str], output: int) -> ForkedProcess | None:
        streams = Streams(stdout=output, stderr=output)
        return self._client.start(module, arguments, environment={}, streams=streams, descriptors=self._descriptors)


def _watch(process: ForkedProcess, on_end: Callable[[], None]) -> WatchedChild:
    try:
        return WatchedChild(process, on_end)
    except OSError:
        # No descriptor to watch it by: it must not run on with nobody to end it.
        process.kill()
        process.wait()
        raise


async def _tell_end(process: asyncio.subprocess.Process, on_end: Callable[[], None]) -> None:
    try:
        await process.wait()
    finally:
        # It was waited for, but a group that still has somebody in it keeps its number.
        if process.returncode is not None:
            kill_group(process.pid)
    on_end()


# TODO docstring of the former serverrun.places:
# The places of a job: every rank of a run with parameter servers, its process now, and what became of those before.


@dataclass(eq=False)
class Place:
    """One rank: its process now, and what became of those before."""

    rank: int
    role: str
    name: str
    group_rank: int = 0
    group: "list[Place]" = field(default_factory=list)
    """The ranks that live and die with it, itself among them, the leader first."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of a leader: one start of its group at a time."""
    process: Started | None = None
    instance_id: str = ""
    step_at_death: int = -1
    futile_deaths: int = 0
    is_done: bool = False
    peak_rss_bytes: int = 0

    @property
    def leader(self) -> "Place":
        """Whom others take for all of the group."""
        return self.group[0]

    @property
    def is_running(self) -> bool:
        """True while there is a process."""
        return self.process is not None and self.process.returncode is None


def make_places(*, num_servers: int, num_workers: int, ranks_per_worker: int, num_centers: int) -> list[Place]:
    """Every rank, in order."""
    groups = [[f"server-{index}"] for index in range(num_servers)]
    for index in range(num_workers):
        groups.append([f"worker-{index}", *(f"worker-{index}.{rank}" for rank in range(1, ranks_per_worker))])
    groups += [[f"center-{index}"] for index in range(num_centers)]
    places: list[Place] = []
    for names in groups:
        group: list[Place] = []
        for group_rank, name in enumerate(names):
            role = name.partition("-")[0]
            group.append(Place(rank=len(places), role=role, name=name, group_rank=group_rank, group=group))
            places.append(group[-1])
    return places


def describe_end(code: int | None) -> str:
    """How a process ended that had not finished."""
    if code == EXIT_DONE:
        return "it left with exit code 0 without having finished"
    return f"killed by {name_signal(-code)}" if code is not None and code < 0 else f"exit code {code}"


def kill_one(process: Started) -> None:
    """Kill a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def kill_places(places: Sequence[Place]) -> None:
    """Kill those that run, and wait for their end."""
    for place in places:
        if place.process is not None and place.is_running:
            with contextlib.suppress(ProcessLookupError):
                place.process.kill()
            await place.process.wait()


# TODO docstring of the former serverrun.standstill:
# Who holds up a run with parameter servers: the watch of the ranks (``launch/hangs.py``), as the job needs it.
#
# The roles judge each other by their messages, and a worker that hangs in a work unit ends itself (``hanging.py``) once
# it knows what
# is usual. What is left is what nobody else can end: a server that is stopped and has no backup, a worker that hangs in its first
# work unit or holds the interpreter's lock. To the job such a process is as good as dead.

_PAUSE_SECONDS = 2.0
_NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A server, or a rank of a worker, that runs."""

    state: StatusReading
    pid: int
    is_server: bool


class HangDetector:
    """Remembers when each member was first seen, and last got anywhere."""

    def __init__(self, config: ProcessConfig) -> None:
        self._config = config
        self._silence = config.model_copy(update={"collective_deadline": _NEVER})
        self._seen: dict[int, tuple[int, int, float, float]] = {}
        """By rank: process, phases entered, when it was first seen and when it last got anywhere."""
        self._looked = self._awake_since = time.monotonic()

    def look(self, members: Sequence[Member], *, now: float) -> Hang | None:
        """The member to end, or None.

        Servers enter no phases: they stand still when nobody asks them. So only workers are held to their progress, all of them
        together, because one may wait for another; and servers when there is no worker left.

        Args:
            members: those that run.
            now: the monotonic time.
        """
        if now - self._looked > _PAUSE_SECONDS:
            self._awake_since = now  # This process was stopped itself, so old heartbeats prove nothing.
        self._looked = now
        watched = [(member, self._watch(member, now)) for member in members]
        workers = [one for member, one in watched if not member.is_server]
        return find_hang(
            [one for _, one in watched], now=now, awake_since=self._awake_since, config=self._silence
        ) or find_hang(
            workers or [one for _, one in watched], now=now, awake_since=self._awake_since, config=self._config
        )

    def _watch(self, member: Member, now: float) -> Watched:
        state, rank = member.state, member.state.rank
        pid, count, started, progress = self._seen.get(rank, (0, 0, now, now))
        if pid != member.pid:
            started = progress = now
        elif count != state.phase_count:
            progress = now
        self._seen[rank] = (member.pid, state.phase_count, started, progress)
        # Until it has claimed its rank status, what is there is the one before's.
        own = state if state.pid == member.pid else replace(state, heartbeat=None, phase="")
        return Watched(state=own, started_at=started, progress_at=progress)
