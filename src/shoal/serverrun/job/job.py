"""A run with parameter servers on this machine: starts the roles, tells the center of deaths, and starts the dead again.

No torch, and no say in the training: who is primary, who is center and what is computed by whom is decided by the roles among
themselves. This process sees what they cannot see quickly, that a process is gone, and it is the one that signals come to.

    rank 0 .. ps-1            servers
    after these               workers, each of one rank or a group of several, whose first is the worker to everyone else
    after these               candidates for the center

The ranks of a group live and die together: the death of one is the death of that worker, and all of them are started again.

A server that ends in order has seen the last checkpoint written. So from the first of these on nobody is started again, and who
has not ended a moment later is not waited for.
"""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import parse_step
from shoal.checkpoint.whole import newest_whole
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST
from shoal.core.rundir import RunDir
from shoal.elastic.election.filelease import read_center
from shoal.launch.blame import EXIT_INTERRUPTED
from shoal.launch.config import ProcessConfig
from shoal.launch.environments import inherited, process_environment
from shoal.launch.group.livefile import LiveFile, LiveProcess
from shoal.launch.hangs import HangWatch, Member
from shoal.launch.jobdirectory import JobDirectory, sweep_job_directories
from shoal.launch.process import Process
from shoal.launch.procfs import peak_resident_bytes, process_state
from shoal.launch.supervisor import stop_signals
from shoal.paramserver.messages import OPERATIONS, Dead, Halt
from shoal.serverrun.job.processes import JobMember, Notifier, Spawner, describe_end, make_members
from shoal.serverrun.notices import Notices
from shoal.telemetry.display import Display
from shoal.telemetry.statusboard import StatusBoard, StatusReading

_LOOK_SECONDS = 0.1
_NOTICES_SECONDS = 0.5
_HANG_SECONDS = 1.0
_STACK_SECONDS = 0.5
_LAST_SECONDS = 10.0
"""How long the others have to end when a server has seen the last checkpoint written."""
_FUTILE_DEATHS = 5
"""Deaths of one member in a row, without a step between them, after which starting again is no cure."""
_TAIL_LINES = 15
_HEADING = re.compile(r"^--- .*, instance \S+ ---$", re.MULTILINE)
"""What stands in a log before the words of each process."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Whom to start, and where."""

    run_dir: Path
    num_servers: int
    num_workers: int
    has_backups: bool = True
    """A shard outlives its server; where none does, the death of a server takes everyone back to a checkpoint."""
    ranks_per_worker: int = 1
    dead_seconds: float = 5.0
    """How long a rank of a group may be silent before it is ended; its leader, as everyone else, is the center's to judge."""
    num_centers: int
    threads: int
    resume: bool
    max_respawns: int
    stop_grace: float
    deadlines: ProcessConfig | None = None
    """How long a server or a worker may be silent, and all workers stand still; None where the caller has a deadline for all."""
    display: Display
    live: LiveFile | None = None
    """Says to others where the processes are; None where nobody asks."""
    closing: Callable[[bool], list[str]] | None
    """The arguments of ``server/finalize.py``, which runs when the roles have ended; told whether nobody stopped it. None: it
    does not run."""
    publishing: list[str] | None = None
    """The arguments of ``serverrun/publishing.py``, which runs beside the roles; None: nothing is published."""
    member_module: str = "shoal.serverrun.job.role"
    """What servers and workers run, under the same arguments; centers always run ``shoal.serverrun.center``."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How it ended."""

    exit_code: int
    signal: int | None = None
    cause: str = ""
    """Of a failure; empty otherwise."""
    step: int = 0
    """The last step that was seen."""
    num_deaths: int = 0
    peak_rss_bytes: tuple[int, ...] = ()
    """Of every server and worker, by rank, over all its instances."""


class Job:
    """The processes of one run."""

    def __init__(self, request: JobRequest) -> None:
        self._request = request
        self._members = make_members(
            num_servers=request.num_servers,
            num_workers=request.num_workers,
            ranks_per_worker=request.ranks_per_worker,
            num_centers=request.num_centers,
        )
        sweep_job_directories()
        self._folder = JobDirectory()
        self._board = StatusBoard.create(len(self._members))
        self._spawner = Spawner(self._environment(), descriptors=(self._board.fd,))
        self._node = Node(instance_id=new_instance_id(), operations=OPERATIONS, arena_dir=self._folder.path)
        self._notifier = Notifier(self._node, find=lambda: read_center(self._folder.path / "lease"))
        self._ended: asyncio.Queue[tuple[JobMember, str]] = asyncio.Queue()
        """Who ended, under which instance."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch = None if request.deadlines is None else HangWatch(request.deadlines)
        self._next_look = 0.0
        self._notices = Notices(request.run_dir)
        self._next_notices = 0.0
        self._signals: list[int] = []
        self._num_deaths = 0
        self._step = 0
        self._failure: tuple[int, str] | None = None
        self._stop_until = float("inf")
        self._last_until = float("inf")
        self._publisher: Process | None = None
        self._is_closing = False

    async def run(self) -> JobResult:
        """Start everyone and see the run to its end."""
        loop = asyncio.get_running_loop()
        caught = stop_signals()
        for number in caught:
            loop.add_signal_handler(number, self._signals.append, number)
        try:
            self._spawner.open()
            self._begin(self._notifier.run())
            if self._request.resume:
                self._begin(self._say_where_from())
            for member in self._members:
                if member is member.leader:
                    self._begin(self._start(member))
            if self._request.publishing is not None:
                self._begin(self._publish(self._request.publishing))
            while not self._is_over():
                await self._turn()
            self._is_closing = True
            await self._kill_all()
            self._tell_notices()
            if self._failure is None and self._request.closing is not None:
                await self._close(self._request.closing(not self._signals))
            return self._end()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._kill_all()
            self._spawner.close()
            await self._node.close()
            for number in caught:
                loop.remove_signal_handler(number)
            self._request.display.update(self._states())
            self._tell_live(self._states())
            if self._request.live is not None:
                self._request.live.end()
            self._board.close()
            self._folder.remove()

    async def _say_where_from(self) -> None:
        # The servers look for it by themselves, so nobody waits for this, and what is wrong with the folder they say.
        try:
            path = (await asyncio.to_thread(newest_whole, RunDir(self._request.run_dir).checkpoints)).path
        except OSError:
            return
        if path is None:
            self._request.display.message("there is no checkpoint to go on from; starting at step 0")
        else:
            self._request.display.message(f"going on from step {parse_step(path.name)}, {path}")

    def _is_over(self) -> bool:
        if self._failure is not None or time.monotonic() > self._last_until:
            return True
        return all(member.is_done for member in self._members if member.role != "center")

    async def _turn(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                member, instance_id = await self._ended.get()
            # One whose group was ended meanwhile has been spoken for.
            if instance_id == member.instance_id:
                self._take_end(member)
        self._spawner.look()
        states = self._states()
        self._step = max(self._step, *(int(state.metrics.get("step", 0)) for state in states))
        self._request.display.update(states)
        self._tell_live(states)
        self._measure()
        self._end_silent()
        if self._watch is not None and time.monotonic() >= self._next_look:
            self._end_hanging(self._watch, states)
        if time.monotonic() >= self._next_notices:
            self._tell_notices()
        if self._signals and self._stop_until == float("inf"):
            self._stop_until = time.monotonic() + self._request.stop_grace
            self._notifier.tell(Halt(reason=signal.Signals(self._signals[0]).name))
        if len(self._signals) > 1 or time.monotonic() > self._stop_until:
            self._failure = (EXIT_INTERRUPTED, "it did not stop in time, or Ctrl-C was pressed twice, and was killed")

    def _tell_notices(self) -> None:
        """Show what the servers wrote down for people."""
        self._next_notices = time.monotonic() + _NOTICES_SECONDS
        for line in self._notices.look():
            self._request.display.message(line)

    def _tell_live(self, states: Sequence[StatusReading]) -> None:
        if self._request.live is not None:
            readings = {state.rank: state for state in states}
            self._request.live.update(
                [
                    LiveProcess.of(
                        readings[member.rank], member.process, name=member.name, has_phases=member.role == "worker"
                    )
                    for member in self._members
                    if member.process is not None
                ]
            )

    def _measure(self) -> None:
        for member in self._members:
            if member.process is not None and member.process.exit_code is None:
                member.peak_rss_bytes = max(member.peak_rss_bytes, peak_resident_bytes(member.process.pid))

    def _end_silent(self) -> None:
        """End a rank of a group that is stopped or hangs: its leader waits for it, and nobody else hears of it."""
        seconds = self._request.dead_seconds
        for member in self._members:
            if member is member.leader or member.process is None or not member.is_running:
                continue
            rank_status, pid = self._board.of_rank(member.rank), member.process.pid
            # Twice: between two words of the first look the status may be a new process's, which beats before it signs.
            if _is_silent(rank_status.read(), pid, seconds) and _is_silent(rank_status.read(), pid, seconds):
                self._request.display.message(
                    f"{member.name} (process {pid}) is silent for {seconds:g} s; it is killed"
                )
                member.process.kill()

    def _end_hanging(self, watch: HangWatch, states: Sequence[StatusReading]) -> None:
        """End a server or a worker that holds the run up for longer than a deadline, after it was asked for its stack."""
        self._next_look = time.monotonic() + _HANG_SECONDS
        watched = [
            Member(state=state, pid=member.process.pid, has_phases=member.role != "server")
            for state in states
            if (member := self._members[state.rank]).role != "center"
            and member.process is not None
            and member.is_running
        ]
        # While it stops, or ends, there is another deadline.
        is_ending = bool(self._signals) or self._last_until < float("inf")
        hang = None if is_ending else watch.look(watched, now=time.monotonic())
        process = None if hang is None else self._members[hang.rank].process
        if hang is None or process is None:
            return
        name, is_stopped = self._members[hang.rank].name, process_state(process.pid) in ("T", "t")
        advice = f"look for its stacks in {self._log(hang.rank)}; if it was only slow, raise the deadlines of [elastic]"
        more = "the process is stopped" if is_stopped else advice
        self._request.display.message(f"{name} (process {process.pid}) is killed: {hang.reason}; {more}")
        # Its own signal handler prints them, at once if it can at all.
        process.send(signal.SIGUSR1)
        asyncio.get_running_loop().call_later(_STACK_SECONDS, process.kill)
        self._next_look += _STACK_SECONDS

    def _states(self) -> list[StatusReading]:
        # The display shows the first: the server that leads the log is the one that has numbers.
        return sorted(self._board.read(), key=lambda state: -int(state.metrics.get("step", -1)))

    # -- starting ---------------------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        request = self._request
        return {
            **inherited(),
            **process_environment(threads=request.threads, run_dir=request.run_dir, run_id=request.run_dir.name),
            "SHOAL_BOARD_FD": str(self._board.fd),
        }

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._work_ended)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is None:
            self._failure = (EXIT_NO, f"{type(error).__name__}: {error}")

    async def _start(self, leader: JobMember) -> None:
        """Start a leader and its group, after what is left of the one before has ended."""
        async with leader.starting:
            for member in leader.group:
                # The end of one that still runs, and is ended here, is no news.
                member.instance_id = ""
            await self._end_processes(leader.group)
            instance_id = new_instance_id()
            for member in leader.group:
                member.process, member.is_done, member.instance_id = None, False, instance_id
            for member in leader.group:
                member.process = await self._spawn(member, instance_id)

    async def _spawn(self, member: JobMember, instance_id: str) -> Process:
        log = self._log(member.rank)
        with log.open("ab", buffering=0) as file:
            file.write(f"--- {member.name}, instance {instance_id} ---\n".encode())  # as _HEADING has it
        arguments = [member.role, "--name", member.name, "--rank", str(member.rank), "--ranks", str(len(self._members))]
        arguments += ["--instance-id", instance_id, "--folder", str(self._folder.path)]
        arguments += ["--run-dir", str(self._request.run_dir)]
        arguments += ["--group-rank", str(member.group_rank)] if member.group_rank else []
        return await self._spawner.start(
            "shoal.serverrun.center" if member.role == "center" else self._request.member_module,
            [*arguments, *(["--resume"] if self._request.resume or self._num_deaths else [])],
            name=member.name,
            log=log,
            on_end=lambda: self._ended.put_nowait((member, instance_id)),
            # A center needs no torch; the first ones are there before the fork server has imported it.
            is_forked=member.role != "center" or self._num_deaths > 0,
        )

    def _log(self, rank: int) -> Path:
        path = RunDir(self._request.run_dir).log(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    # -- ending -----------------------------------------------------------------------------------------------------------------

    def _take_end(self, member: JobMember) -> None:
        assert member.process is not None and member.process.exit_code is not None
        is_done, leader = self._has_finished(member), member.leader
        if is_done or self._last_until < float("inf"):
            self._take_done(member, is_done=is_done)
            return
        member, process = self._culprit(member)
        code = process.exit_code
        if code == EXIT_WRONG_REQUEST:
            # A run that has made a step was right in the beginning; what it has written is not to be taken for nothing.
            self._failure = (EXIT_NO if self._step else EXIT_WRONG_REQUEST, self._tail(member.rank))
            return
        self._num_deaths += 1
        how = describe_end(code)
        self._notifier.tell(Dead(member=leader.instance_id, reason=how))
        for other in leader.group:
            # What becomes of the others now is no news.
            other.instance_id = ""
        is_futile = self._step == leader.step_at_death
        leader.futile_deaths = leader.futile_deaths + 1 if is_futile else 1
        leader.step_at_death = self._step
        if leader.futile_deaths >= _FUTILE_DEATHS or self._num_deaths > self._request.max_respawns:
            log = f"its log: {self._log(member.rank)}"
            self._failure = (
                EXIT_NO,
                "\n".join(filter(None, (self._too_many(member, how), self._tail(member.rank), log))),
            )
            return
        message = f"{member.name} (process {process.pid}) died: {how}"
        if self._signals and member.role == "worker":
            self._request.display.message(message)
            for other in leader.group:
                other.is_done = True
            self._begin(self._end_processes(leader.group))
            return
        whole = "" if len(leader.group) == 1 else f"{leader.name} with its {len(leader.group)} ranks"
        back = ""
        if member.role == "server" and not self._request.has_backups:
            back = ", and everybody goes back to the newest checkpoint, or to step 0 where there is none: backup=0"
        self._request.display.message(f"{message}; {whole or 'it'} is started again{back}")
        self._begin(self._start(leader))
        if member.role == "server":
            self._recall_workers()

    def _has_finished(self, member: JobMember) -> bool:
        """Whether a process that has ended did what it was for: it says so itself, on the board (``serverrun/process.py``)."""
        state, process = self._board.of_rank(member.rank).read(), member.process
        has_said = process is not None and state.pid == process.pid and state.final_status == "completed"
        return has_said and process is not None and process.exit_code == EXIT_DONE

    def _culprit(self, member: JobMember) -> tuple[JobMember, Process]:
        """Of a group whose end was seen in one of its ranks, the one to blame, and its process: the others end because of it."""
        assert member.process is not None
        for other in member.group:
            code = None if other.process is None else other.process.exit_code
            left = code == EXIT_DONE and not self._has_finished(other)
            if other.process is not None and code is not None and (code < 0 or code == EXIT_WRONG_REQUEST or left):
                return other, other.process
        return member, member.process

    def _take_done(self, member: JobMember, *, is_done: bool) -> None:
        """A process ended in order, or at a time when nobody is started again."""
        if member is member.leader:
            for other in member.group:
                other.is_done = True
        if is_done and member.role == "server":
            self._last_until = min(self._last_until, time.monotonic() + _LAST_SECONDS)

    def _too_many(self, member: JobMember, how: str) -> str:
        if self._num_deaths > self._request.max_respawns:
            most = self._request.max_respawns
            return f"{self._num_deaths} processes died, and paramserver.max_respawns is {most}; {member.name} was the last: {how}"
        times = member.leader.futile_deaths
        return f"{member.name} died {times} times in a row without a step between, the last time: {how}"

    def _recall_workers(self) -> None:
        """A worker that found nothing more to do may be needed again: without a backup the death of a server undoes work."""
        for member in self._members:
            if member.role == "worker" and member is member.leader and member.is_done:
                self._begin(self._start(member))

    async def _close(self, arguments: list[str]) -> None:
        """Let a process load what was written last and say how the run went."""
        rank = len(self._members)
        ended = asyncio.Event()
        num_signals = len(self._signals)
        process = await self._spawner.start(
            "shoal.serverrun.server.finalize", arguments, name="finalize", log=self._log(rank), on_end=ended.set
        )
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await ended.wait()
            if len(self._signals) > num_signals:
                await self._spawner.end([process])
                self._failure = (
                    EXIT_INTERRUPTED,
                    "it was stopped while the last checkpoint was evaluated; --resume does that",
                )
                return
        if process.exit_code != EXIT_DONE:
            self._failure = (EXIT_NO, f"the last checkpoint could not be evaluated:\n{self._tail(rank)}")

    async def _publish(self, arguments: list[str]) -> None:
        """Keep the process that publishes: it holds nothing of the run, so its death costs a refresh at most."""
        for _ in range(1 + self._request.max_respawns):
            ended = asyncio.Event()
            self._publisher = await self._spawner.start(
                "shoal.serverrun.publishing",
                arguments,
                name="publishing",
                log=self._log(len(self._members)),
                on_end=ended.set,
            )
            await ended.wait()
            if self._is_closing:
                return
            self._request.display.message("the process that publishes has ended; it is started again")

    def _tail(self, rank: int) -> str:
        """The last lines that the last process of a rank wrote."""
        text = _HEADING.split(self._log(rank).read_text(errors="replace"))[-1].strip("\n")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    async def _kill_all(self) -> None:
        if self._publisher is not None:
            await self._spawner.end([self._publisher])
        await self._end_processes(self._members)

    async def _end_processes(self, members: Sequence[JobMember]) -> None:
        await self._spawner.end(member.process for member in members if member.process is not None)

    def _end(self) -> JobResult:
        code, cause = self._failure or (EXIT_DONE, "")
        return JobResult(
            exit_code=code,
            cause=cause,
            signal=self._signals[0] if self._signals else None,
            step=self._step,
            num_deaths=self._num_deaths,
            peak_rss_bytes=tuple(member.peak_rss_bytes for member in self._members if member.role != "center"),
        )


def _is_silent(state: StatusReading, pid: int, seconds: float) -> bool:
    """True when this process has a rank status, and its heart has not beaten for so long."""
    return state.pid == pid and state.heartbeat is not None and time.monotonic() - state.heartbeat > seconds


def run_job(request: JobRequest) -> JobResult:
    """Run a job to its end."""

    async def go() -> JobResult:
        return await Job(request).run()

    return asyncio.run(go())
