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
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial

from shoal.comm.store.file import StoreFile
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.core.rundir import RunDir
from shoal.launch import forkclient
from shoal.launch.blame import GenerationEnd, Outcome, RankEnd, blame
from shoal.launch.errorreport import clear_reports, read_report
from shoal.launch.failurereport import say_stopping
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient
from shoal.launch.group.elastic import ElasticGroup, Group
from shoal.launch.group.generations import run_generations
from shoal.launch.group.livefile import LiveProcess
from shoal.launch.group.request import LaunchRequest
from shoal.launch.hangs import Hang, HangWatch, Member, is_waiting
from shoal.launch.output import Log, RankStream
from shoal.launch.process import Process, Streams
from shoal.launch.procfs import catches_signal, count_oom_kills, process_state, resident_bytes
from shoal.launch.supervisor import (
    KILL_SECONDS,
    ORDER_FAIL,
    ORDER_STACKS,
    ORDERS,
    SignalInbox,
    Supervisor,
)
from shoal.telemetry.eventlog import append_event
from shoal.telemetry.statusboard import StatusBoard, StatusReading

COLLECT_S = 1.0
"""How long the others may still report after one rank has failed."""
STACK_SIGNAL = signal.SIGUSR1
"""Sent to ranks when one hangs; a worker registers ``faulthandler`` for it and so prints where it is."""
_LOOK_EVERY_S = 0.2
_HEAR_EVERY_S = 0.02
"""How often what the ranks of an elastic group say is heard."""
_READ_BYTES = 64 * 1024
_DRAIN_BYTES = 4 << 20


def supervise(request: LaunchRequest) -> Outcome:
    """Start the ranks and stay with them until all have ended.

    Every generation has its own status board, its own store in a new file, and empty error reports, so nothing of a dead
    generation can be taken for the living one's.

    Raises:
        RunError: a rank could not be started, or this is not the main thread.
    """
    with SignalInbox() as inbox, contextlib.closing(fork_client(request)) as client:
        return run_generations(request, lambda number: Generation(request, number, inbox, client).run())


def fork_client(request: LaunchRequest) -> ForkClient:
    """What forks the ranks of a request on this host, where there are enough of them to be worth it."""
    is_worth_it = request.module and len(request.local_ranks) >= forkclient.FEWEST_TO_FORK
    return ForkClient([request.module, PRELOAD_OPTIMIZER] if is_worth_it else [], request.environment)


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


class Generation:
    """The ranks of one start on this host. ``run`` returns when none of them is left."""

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
        # Where ranks are on other hosts too, they may be what these wait for: only who sees all can tell who stands still.
        self._sees_all = len(request.local_ranks) == request.num_ranks
        self._watch = HangWatch(request.config, finds_stalls=self._sees_all)
        self._looked_at = time.monotonic()
        self._oom_kills = count_oom_kills()
        self._group = self._build_group()
        self._store = StoreFile()
        self._board = StatusBoard.create(request.num_ranks if self._group is None else self._group.control.num_slots)
        control = () if self._group is None else (self._group.control.fd,)
        self._absolved: list[RankEnd] = []
        """Ends of ranks whose group went on, or tried to."""
        self._causes: dict[int, str] = {}
        """Why ranks are ended whose group goes on."""
        self._supervisor = Supervisor(
            client,
            environment=request.environment,
            descriptors=(self._board.fd, *self._store.descriptors, *control, *request.descriptors),
        )

    def _build_group(self) -> Group | None:
        if self._request.build_group is not None:
            return self._request.build_group()
        if self._request.build_policy is None:
            return None
        events = RunDir(self._request.run_dir).supervisor_events
        return ElasticGroup(
            self._request.build_policy(()),
            report=lambda event: append_event(events, event, rank=None),
            tell=self._display.message,
            host=socket.gethostname(),
        )

    def run(self) -> GenerationEnd:
        """Start the ranks and see them to their end.

        Raises:
            RunError: a rank could not be started; those that were have been killed.
        """
        try:
            clear_reports(self._request.run_dir, self._request.local_ranks)
            self._start()
            self._supervisor.watch(self._inbox, self._take_signals)
            while (self._supervisor.running or self._may_start_more()) and not self._is_given_up():
                self._turn()
            self._display.update(self._shown())
            self._tell_live(self._board.read())
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
        if self._group is not None:
            self._start_members(self._group)
        else:
            for rank in self._request.local_ranks:
                self._begin_rank(rank)
        self._client.release()

    def _may_start_more(self) -> bool:
        """Whether somebody elsewhere may want a process started here though none runs."""
        return self._group is not None and self._mode is _Mode.RUNNING and self._group.may_start_more

    def _start_members(self, group: Group) -> None:
        for start in group.take_starts():
            self._begin_rank(start.slot, group.environment(start))

    def _begin_rank(self, rank: int, member: Mapping[str, str] | None = None) -> None:
        started = self._start_rank(rank, member)
        # A member of an elastic group takes the place of the one before in its slot.
        place = next((place for place, other in enumerate(self._ranks) if other.rank == rank), len(self._ranks))
        self._ranks[place : place + 1] = [started]
        started.log.write([f"--- rank {rank}, generation {self._number}, pid {started.process.pid} ---".encode()])
        for fd, stream in started.streams.items():
            self._supervisor.watch(fd, partial(self._read, fd, stream))

    def _await_server(self) -> bool:
        """Wait until ranks can be forked, or must be started without; False when a signal asks to stop before that."""
        while not self._client.wait(self._inbox.fileno()):
            self._take_signals()
            if self._mode is not _Mode.RUNNING:
                return False
        return True

    def _start_rank(self, rank: int, member: Mapping[str, str] | None) -> _Rank:
        command = self._request.command(
            rank, generation=self._number, board=self._board, store=self._store, member=member
        )
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
        most = _LOOK_EVERY_S if self._group is None else _HEAR_EVERY_S
        ended = self._supervisor.turn(most if self._deadline is None else min(most, self._deadline.remaining))
        for rank in self._ranks:
            if rank.process in ended:
                self._notice_end(rank)
        if self._group is not None and self._mode is _Mode.RUNNING:
            self._group.look()
            self._follow(self._group)
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
            self._show(stream.feed(data) if data else stream.finish(), stream)
            if not data:
                self._supervisor.unwatch(fd)
                return
            most -= len(data)

    def _show(self, text: str | None, stream: RankStream) -> None:
        output = self._request.output
        if text is None:
            return
        if output is None or not any(stream is rank.stdout for rank in self._ranks):
            self._display.message(text)
            return
        # Who reads it may have gone, as after `| head`; the run goes on, and its logs have everything.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=output, flush=True)

    def _notice_end(self, rank: _Rank) -> None:
        # Not until end of file: a process that the rank started may hold the pipe open for ever.
        for fd, stream in rank.streams.items():
            if self._supervisor.is_watched(fd):
                self._read(fd, stream, most=_DRAIN_BYTES)
            if self._supervisor.is_watched(fd):
                self._show(stream.finish(), stream)
                self._supervisor.unwatch(fd)
        rank.close()
        end = self._describe_rank(rank)
        code = end.exit_code
        if self._request.on_end is not None:
            self._request.on_end(end)
        if self._group is not None and self._mode < _Mode.FAILING and self._goes_on(self._group, rank, end):
            return
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

    def _goes_on(self, group: Group, rank: _Rank, end: RankEnd) -> bool:
        """Whether the group goes on after the end of a rank, which has been told of it."""
        if end.is_complete:
            group.finish()
        if end.is_orderly and not any(one.process.is_running for one in self._ranks if one.rank in group.present):
            self._kill_all()  # Spares, those who were about to join; and one that died after all was done.
        if end.is_complete:
            return True
        is_hopeless = end.report is not None and end.report.exit in ("request", "final")
        if group.is_over or self._mode is not _Mode.RUNNING or end.is_orderly or is_hopeless:
            return group.is_over
        found = blame([replace(end, rank=0)])
        cause = self._causes.pop(rank.rank, None) or (found.cause if found is not None else "it was ended")
        where = f" at step {end.step} in phase {end.phase!r}" if end.phase else ""
        self._display.message(f"lost rank {rank.rank} on {group.host}{where}: {cause}")
        # One that hung was killed by us, and is to blame none the less.
        self._absolved.append(replace(end, signals_sent=frozenset()))
        group.lost(rank.rank, cause.splitlines()[0] if cause else "it ended")
        self._follow(group)
        return group.gave_up is None

    def _follow(self, group: Group) -> None:
        """Do what the group's policy wants."""
        for slot, reason in group.take_ends():
            self._causes[slot] = reason
            self._supervisor.kill([one.process for one in self._ranks if one.rank == slot])
        self._start_members(group)
        if group.gave_up is not None and self._mode is _Mode.RUNNING:
            self._display.message(f"the run cannot go on: {group.gave_up}")
            self._kill_all()

    def _enter(self, mode: _Mode, seconds: float) -> None:
        if mode > self._mode:
            self._mode, self._deadline = mode, Deadline(seconds=seconds)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if number in ORDERS:
                self._obey(number)
                continue
            self._stop_signal = self._stop_signal or number
            if self._mode is _Mode.RUNNING:
                self._stop(number)
            elif number == signal.SIGINT and self._mode < _Mode.KILLING:
                self._display.message("stopping at once")
                self._kill_all()

    def _obey(self, order: int) -> None:
        """Do what the coordinator of several hosts has ordered."""
        everyone = self._ranks
        if order == ORDER_STACKS:
            self._ask_for_stacks(everyone)
        elif order == ORDER_FAIL:
            self._enter(_Mode.FAILING, COLLECT_S)
        elif self._mode < _Mode.KILLING:
            self._kill_all()

    def _stop(self, number: int) -> None:
        grace = self._request.config.stop_grace
        if self._sees_all:
            self._display.message(say_stopping(number, grace, has_ranks=bool(self._ranks)))
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
        self._display.update(self._shown())
        self._tell_live(states)
        members = [
            Member(state=states[rank.rank], pid=rank.process.pid, is_running=rank.process.is_running)
            for rank in self._ranks
            if self._group is None or rank.process.is_running
        ]
        hang = self._watch.look(members, now=now)
        if hang is None or self._mode is not _Mode.RUNNING:
            return
        accused = next(rank for rank in self._ranks if rank.rank == hang.rank)
        if self._group is not None:
            self._causes[hang.rank] = f"it hung: {hang.reason}"
            self._supervisor.kill([accused.process])
            return
        is_stopped = process_state(accused.process.pid) in ("T", "t")
        self._hang = Hang(rank=hang.rank, reason=f"{hang.reason}, the process is stopped") if is_stopped else hang
        self._ask_for_stacks(self._ranks)
        self._enter(_Mode.FAILING, COLLECT_S)

    def _tell_live(self, states: Sequence[StatusReading]) -> None:
        if self._request.live is not None:
            seen = [LiveProcess.of(states[one.rank], one.process, rss_bytes=one.resident_bytes) for one in self._ranks]
            self._request.live.update(seen, generation=self._number)

    def _shown(self) -> Sequence[StatusReading]:
        """The state of the ranks for the display, which looks at the first one most of all."""
        states = self._board.read()
        # One of several hosts shows all that it has, by their numbers.
        if self._group is None or self._request.build_group is not None:
            return states
        return [states[slot] for slot in self._group.present]

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
        ends = [self._describe_rank(rank) for rank in self._ranks]
        if self._group is not None:
            ends = self._ends_of_group(self._group, ends)
        return GenerationEnd(
            ends=ends,
            stop_signal=self._stop_signal,
            hang=self._hang,
            oom_kills=killed_now - self._oom_kills if killed_now is not None and self._oom_kills is not None else 0,
        )

    def _ends_of_group(self, group: Group, ends: list[RankEnd]) -> list[RankEnd]:
        """The ends that a run is judged by: of those who took part at last; where it could not go on, of the last one lost."""
        by_slot = {end.rank: end for end in ends}
        last = [by_slot[slot] for slot in group.present if slot in by_slot]
        if group.is_over:
            return [end for end in last if end.is_complete]
        lost = self._absolved[-1:] if group.gave_up is not None else []
        return [*lost, *(end for end in last if end.rank not in {one.rank for one in lost})]

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
        if self._group is not None:
            self._group.close()
        self._board.close()
        self._store.close()


def _open_pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    return reading, writing
