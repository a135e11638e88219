"""The ranks of a run on this machine: run to their end, started again when one fails, and the first cause of a failure named.

Shoal has a supervisor of its own because ``torchrun --standalone`` was measured to hang in 2 of 12 kills of a rank, to leave its
workers behind when it is killed itself, not to notice a stopped rank, and to listen on every interface. This one keeps torchrun's
environment, has no thread, listens on nothing, and imports no torch: a process that only waits must be small and quick.

One start of all ranks is a generation. Its loop reads the ranks' output, notices their ends, takes signals and looks at the
status board, and it never waits for a single rank. What it does changes in four modes, and only downwards:

    RUNNING    watch; the end of one rank that has not said that it is done leads to FAILING, a signal to us to STOPPING
    STOPPING   ranks were asked to finish their step and save; they have ``stop_grace``
    FAILING    a rank failed; the others have a second to say what they saw
    KILLING    everything left was killed; wait for the kernel to confirm it
"""

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.core.events import RankFailed
from shoal.core.rundir import RunDir
from shoal.launch import forkclient
from shoal.launch.blame import GenerationEnd, Outcome, RankEnd, judge, name_signal
from shoal.launch.config import ProcessConfig
from shoal.launch.environments import inherited, process_environment, rank_environment
from shoal.launch.errorreport import clear_reports, read_report
from shoal.launch.failurereport import headline
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient
from shoal.launch.hangs import Hang, HangWatch, Member, is_waiting
from shoal.launch.output import Log, RankStream
from shoal.launch.process import Process, Streams
from shoal.launch.procfs import catches_signal, count_oom_kills, process_state, resident_bytes
from shoal.launch.supervisor import KILL_SECONDS, Command, SignalInbox, Supervisor
from shoal.telemetry.display import Display
from shoal.telemetry.eventlog import append_event
from shoal.telemetry.statusboard import StatusBoard

COLLECT_S = 1.0
"""How long the others may still report after one rank has failed."""
STACK_SIGNAL = signal.SIGUSR1
"""Sent to ranks when one hangs; a worker registers ``faulthandler`` for it and so prints where it is."""
_LOOK_EVERY_S = 0.2
_READ_BYTES = 64 * 1024
_DRAIN_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A group of local ranks to run to their end."""

    argv: Sequence[str] = ()
    """The worker's command, the same for every rank; what differs is in its environment. Left out where a module is given."""
    module: str = ""
    """Whose ``main`` is the worker. Ranks are then forked from one process that has imported it."""
    arguments: Sequence[str] = ()
    """Of the module."""
    shared: Sequence[str] = ()
    """``module:function`` and its arguments: called once, before ranks are forked, for what they share in memory."""
    num_ranks: int
    run_dir: Path
    run_id: str
    display: Display
    """Closed by the supervisor, so that what is printed afterwards stays last."""
    config: ProcessConfig = field(default_factory=ProcessConfig)
    last_step: int = 0
    """That the ranks are to reach, for messages; 0 when unknown."""
    threads: int = 1
    """Compute threads per rank."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to, or to put over, those that the supervisor sets."""

    @property
    def environment(self) -> dict[str, str]:
        """What all ranks have in common."""
        values = process_environment(threads=self.threads, run_dir=self.run_dir, run_id=self.run_id)
        restarts = {"TORCHELASTIC_MAX_RESTARTS": str(self.config.max_restarts)}
        return {**inherited(), **values, **restarts, **self.env}

    def command(self, rank: int, *, generation: int, board: StatusBoard, store: "StoreFile") -> Command:
        """What one rank runs."""
        values = {
            **rank_environment(rank=rank, num_ranks=self.num_ranks),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "SHOAL_GENERATION": str(generation),
            "SHOAL_BOARD_FD": str(board.fd),
            "SHOAL_STORE": store.path,
        }
        return Command(
            name=f"rank {rank}",
            argv=self.argv,
            module=self.module,
            arguments=self.arguments,
            environment={**values, **self.env},
        )


def supervise(request: LaunchRequest) -> Outcome:
    """Start the ranks and stay with them until all have ended.

    Every generation has its own status board, its own store in a new file, and empty error reports, so nothing of a dead
    generation can be taken for the living one's.

    Raises:
        RunError: a rank could not be started, or this is not the main thread.
    """
    is_worth_it = request.module and request.num_ranks >= forkclient.FEWEST_TO_FORK
    client = ForkClient([request.module, PRELOAD_OPTIMIZER] if is_worth_it else [], request.environment)
    with SignalInbox() as inbox, contextlib.closing(client):
        try:
            for number in itertools.count():
                outcome = judge(_Generation(request, number, inbox, client).run(), restarts=number)
                culprit = outcome.culprit
                if culprit is None:
                    return outcome
                restarting = outcome.status == "failed" and culprit.can_restart and number < request.config.max_restarts
                failed = RankFailed(
                    culprit_rank=culprit.rank,
                    step=culprit.step,
                    phase=culprit.phase,
                    cause=culprit.cause,
                    generation=number,
                    restarting=restarting,
                )
                append_event(RunDir(request.run_dir).supervisor_events, failed, rank=None)
                if not restarting:
                    return outcome
                left = request.config.max_restarts - number - 1
                request.display.message(
                    f"{headline(culprit)}\nstarting all ranks again from the newest checkpoint; {left} restarts left"
                )
            raise AssertionError("generations are counted without end")
        finally:
            request.display.close()


class StoreFile:
    """The file in which the ranks of one generation meet (torch's ``FileStore``), for this user alone.

    On Linux it has no name: the ranks inherit its descriptor, and nothing is left when they are gone, however they ended.
    Elsewhere it lies in a folder that only this user can enter, until ``close``.
    """

    def __init__(self) -> None:
        self.descriptors: tuple[int, ...] = ()
        """What a rank has to inherit."""
        self._folder = ""
        if sys.platform == "linux":
            self.descriptors = (os.memfd_create("shoal-store"),)
            self.path = f"/proc/self/fd/{self.descriptors[0]}"
        else:
            self._folder = tempfile.mkdtemp(prefix="shoal-store-")
            self.path = os.path.join(self._folder, "store")

    def close(self) -> None:
        """Let go of it; ranks that run keep what they inherited. May be called twice."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Rank:
    """A rank of one generation: its process, and what it prints."""

    def __init__(self, rank: int, process: Process, pipes: tuple[int, int], log: Log) -> None:
        self.rank = rank
        self.process = process
        self.log = log
        self.resident_bytes: int | None = None
        """Last known memory."""
        self.stdout = RankStream(log, prefix="" if rank == 0 else f"[rank {rank}] ")
        self.stderr = RankStream(log, prefix=f"[rank {rank}] ")
        self.streams = dict(zip(pipes, (self.stdout, self.stderr), strict=True))
        for fd in pipes:
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Close its pipes and its log."""
        for fd in self.streams:
            os.close(fd)
        self.streams = {}
        self.log.close()


class _Mode(IntEnum):
    RUNNING = 0
    STOPPING = 1
    FAILING = 2
    KILLING = 3


class _Generation:
    """The ranks of one start. ``run`` returns when none of them is left."""

    def __init__(self, request: LaunchRequest, number: int, inbox: SignalInbox, client: ForkClient) -> None:
        self._request = request
        self._number = number
        self._inbox = inbox
        self._client = client
        self._display = request.display
        self._ranks: list[_Rank] = []
        self._mode = _Mode.RUNNING
        self._deadline: Deadline | None = None
        self._stop_signal: int | None = None
        self._hang: Hang | None = None
        self._watch = HangWatch(request.config)
        self._looked_at = time.monotonic()
        self._oom_kills = count_oom_kills()
        self._board = StatusBoard.create(request.num_ranks)
        self._store = StoreFile()
        self._supervisor = Supervisor(
            client, environment=request.environment, descriptors=(self._board.fd, *self._store.descriptors)
        )

    def run(self) -> GenerationEnd:
        """Start the ranks and see them to their end.

        Raises:
            RunError: a rank could not be started; those that were have been killed.
        """
        try:
            clear_reports(self._request.run_dir)
            self._start()
            self._supervisor.watch(self._inbox, self._take_signals)
            while self._supervisor.running and not self._is_given_up():
                self._turn()
            self._display.update(self._board.read())
            return self._describe_end()
        finally:
            self._close()

    def _start(self) -> None:
        self._client.open()
        if not self._await_server():
            return
        if self._request.shared:
            function, *arguments = self._request.shared
            self._client.prepare(
                function,
                arguments,
                environment=self._request.environment,
                seconds=self._request.config.collective_deadline,
            )
            if not self._await_server():
                return
            if self._client.unprepared and self._number == 0:
                self._display.message(f"each rank builds the model by itself: {self._client.unprepared}")
        if self._client.problem and self._number == 0:
            problem = self._client.problem
            self._display.message(f"ranks are started one by one; the process to fork them from failed: {problem}")
        for rank in range(self._request.num_ranks):
            started = self._start_rank(rank)
            self._ranks.append(started)
            started.log.write([f"--- rank {rank}, generation {self._number}, pid {started.process.pid} ---".encode()])
            for fd, stream in started.streams.items():
                self._supervisor.watch(fd, partial(self._read, fd, stream))
        self._client.release()

    def _await_server(self) -> bool:
        """Wait until ranks can be forked, or must be started without; False when a signal asks to stop before that."""
        while not self._client.wait(self._inbox.fileno()):
            self._take_signals()
            if self._mode is not _Mode.RUNNING:
                return False
        return True

    def _start_rank(self, rank: int) -> _Rank:
        command = self._request.command(rank, generation=self._number, board=self._board, store=self._store)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            log = Log(RunDir(self._request.run_dir).log(rank))
            ours.callback(log.close)
            try:
                (stdout, output), (stderr, errors) = (_open_pipe(ours, theirs) for _ in range(2))
                process = self._supervisor.start(command, Streams(stdout=output, stderr=errors))
            except OSError as error:
                raise RunError(
                    f"cannot start rank {rank} of {self._request.num_ranks} ({command.line[0]}): {error}"
                ) from error
            ours.pop_all()
            return _Rank(rank, process, (stdout, stderr), log)

    def _is_given_up(self) -> bool:
        """Whether those that are left do not end even when killed."""
        if self._mode is not _Mode.KILLING or self._deadline is None or not self._deadline.is_over:
            return False
        for process in self._supervisor.running:
            self._display.message(
                f"{process.name} (process {process.pid}) does not end even when killed; it is left behind"
            )
        return True

    def _turn(self) -> None:
        ended = self._supervisor.turn(
            _LOOK_EVERY_S if self._deadline is None else min(_LOOK_EVERY_S, self._deadline.remaining)
        )
        for rank in self._ranks:
            if rank.process in ended:
                self._notice_end(rank)
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._look()
        if self._deadline is not None and self._deadline.is_over and self._mode < _Mode.KILLING:
            self._kill_all()

    def _read(self, fd: int, stream: RankStream, most: int = _READ_BYTES) -> None:
        """Take what is there, up to ``most`` bytes: a rank that never stops printing must not keep the others waiting."""
        while most > 0:
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            self._show(stream.feed(data) if data else stream.finish())
            if not data:
                self._supervisor.unwatch(fd)
                return
            most -= len(data)

    def _show(self, text: str | None) -> None:
        if text is not None:
            self._display.message(text)

    def _notice_end(self, rank: _Rank) -> None:
        # Not until end of file: a process that the rank started may hold the pipe open for ever.
        for fd, stream in rank.streams.items():
            if self._supervisor.is_watched(fd):
                self._read(fd, stream, most=_DRAIN_BYTES)
            if self._supervisor.is_watched(fd):
                self._show(stream.finish())
                self._supervisor.unwatch(fd)
        rank.close()
        end = self._describe_rank(rank)
        code = end.exit_code
        if end.is_complete or self._mode >= _Mode.FAILING:
            return
        if end.is_orderly:
            self._enter(_Mode.STOPPING, self._request.config.stop_grace)
        elif code is not None and code < 0 and code != -signal.SIGABRT and -code not in rank.process.signals_sent:
            self._kill_all()  # the cause is known, and nobody else can say more about it
        else:
            if end.report is not None and end.report.peer_failure:
                self._ask_for_stacks([other for other in self._ranks if self._is_absent(other)])
            self._enter(_Mode.FAILING, COLLECT_S)

    def _enter(self, mode: _Mode, seconds: float) -> None:
        if mode > self._mode:
            self._mode, self._deadline = mode, Deadline(seconds=seconds)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            self._stop_signal = self._stop_signal or number
            if self._mode is _Mode.RUNNING:
                self._stop(number)
            elif number == signal.SIGINT and self._mode < _Mode.KILLING:
                self._display.message("stopping at once")
                self._kill_all()

    def _stop(self, number: int) -> None:
        grace = self._request.config.stop_grace
        self._display.message(
            f"{name_signal(number)}: finishing the step and writing a checkpoint, for at most {grace:g} s; "
            "another Ctrl-C stops at once"
            if self._ranks
            else f"{name_signal(number)}: stopping before a rank was started"
        )
        self._enter(_Mode.STOPPING, grace)
        for process in self._supervisor.running:
            process.send(signal.SIGTERM)

    def _kill_all(self) -> None:
        self._supervisor.kill()
        self._enter(_Mode.KILLING, KILL_SECONDS)

    def _look(self) -> None:
        now = self._looked_at = time.monotonic()
        for rank in self._ranks:
            if rank.process.is_running:
                rank.resident_bytes = resident_bytes(rank.process.pid) or rank.resident_bytes
        states = self._board.read()
        self._display.update(states)
        members = [
            Member(state=states[rank.rank], pid=rank.process.pid, is_running=rank.process.is_running)
            for rank in self._ranks
        ]
        hang = self._watch.look(members, now=now)
        if hang is None or self._mode is not _Mode.RUNNING:
            return
        is_stopped = process_state(self._ranks[hang.rank].process.pid) in ("T", "t")
        self._hang = Hang(rank=hang.rank, reason=f"{hang.reason}, the process is stopped") if is_stopped else hang
        self._ask_for_stacks(self._ranks)
        self._enter(_Mode.FAILING, COLLECT_S)

    def _ask_for_stacks(self, ranks: Sequence[_Rank]) -> None:
        for rank in ranks:
            # One that is still starting would die of the signal, and could not say what it dies of.
            if rank.process.is_running and catches_signal(rank.process.pid, STACK_SIGNAL):
                rank.stderr.expect_stacks()
                rank.process.send(STACK_SIGNAL)

    def _is_absent(self, rank: _Rank) -> bool:
        """Whether others may have waited for this rank in vain: it runs, does not wait itself and has not said why it fails."""
        is_busy = rank.process.is_running and not is_waiting(self._board.of_rank(rank.rank).read().phase)
        return is_busy and read_report(self._request.run_dir, rank.rank) is None

    def _describe_end(self) -> GenerationEnd:
        killed_now = count_oom_kills()
        return GenerationEnd(
            ends=[self._describe_rank(rank) for rank in self._ranks],
            stop_signal=self._stop_signal,
            hang=self._hang,
            oom_kills=killed_now - self._oom_kills if killed_now is not None and self._oom_kills is not None else 0,
        )

    def _describe_rank(self, rank: _Rank) -> RankEnd:
        state = self._board.of_rank(rank.rank).read()
        return RankEnd(
            rank=rank.rank,
            exit_code=rank.process.exit_code,
            ended_at=rank.process.ended_at or time.time(),
            step=state.step,
            phase=state.phase,
            phase_count=state.phase_count,
            final_status=state.final_status,
            stop_signal=state.stop_signal,
            last_step=self._request.last_step,
            signals_sent=frozenset(rank.process.signals_sent),
            report=read_report(self._request.run_dir, rank.rank),
            resident_bytes=rank.resident_bytes,
            tail=rank.stderr.tail,
            log=str(rank.log.path),
        )

    def _close(self) -> None:
        """Leave nothing: reached in order, or because a rank could not be started or the display broke."""
        self._supervisor.close()
        for rank in self._ranks:
            rank.close()
        self._board.close()
        self._store.close()


def _open_pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    return reading, writing
