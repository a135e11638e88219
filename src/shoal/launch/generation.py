"""One start of all ranks, from the first process to the end of the last: the event loop of the supervisor.

One thread and one selector. It reads the ranks' output, notices their ends, takes signals and looks at the board, and it never
waits for any single one of these. What it does changes in four modes, and only downwards:

    RUNNING    watch; the end of one rank that has not said that it is done leads to FAILING, a signal to us to STOPPING
    STOPPING   ranks were asked to finish their step and save; they have ``stop_grace``
    FAILING    a rank failed; the others have a second to say what they saw
    KILLING    everything left was killed; wait for the kernel to confirm it
"""

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

from shoal.core.clock import Deadline
from shoal.launch.blame import GenerationEnd, RankEnd, name_signal
from shoal.launch.errorreport import clear_reports, read_report
from shoal.launch.forkclient import ForkClient
from shoal.launch.hangs import Hang, Watched, find_hang, is_waiting
from shoal.launch.launch import LaunchRequest
from shoal.launch.output import RankStream
from shoal.launch.procfs import catches_signal, count_oom_kills, process_state, resident_bytes
from shoal.launch.signals import SignalInbox
from shoal.launch.spawn import RankProcess, StoreFile, rank_environment, start_rank
from shoal.telemetry.statusboard import StatusBoard

COLLECT_S = 1.0
"""How long the others may still report after one rank has failed."""
STACK_SIGNAL = signal.SIGUSR1
"""Sent to ranks when one hangs; a worker registers ``faulthandler`` for it and so prints where it is."""
_LOOK_EVERY_S = 0.2
_KILL_WITHIN_S = 10.0
_PAUSE_S = 2.0
_READ_BYTES = 64 * 1024
_DRAIN_BYTES = 4 << 20


class _Mode(IntEnum):
    RUNNING = 0
    STOPPING = 1
    FAILING = 2
    KILLING = 3


class Generation:
    """The ranks of one start. ``run`` returns when none of them is left."""

    def __init__(self, request: LaunchRequest, number: int, inbox: SignalInbox, client: ForkClient) -> None:
        self._request = request
        self._number = number
        self._inbox = inbox
        self._client = client
        self._display = request.display
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._mode = _Mode.RUNNING
        self._deadline: Deadline | None = None
        self._stop_signal: int | None = None
        self._hang: Hang | None = None
        self._progress = [(-1, 0.0)] * request.num_ranks
        self._awake_since = self._looked_at = time.monotonic()
        self._oom_kills = count_oom_kills()
        self._board = StatusBoard.create(request.num_ranks)
        self._store = StoreFile()

    def run(self) -> GenerationEnd:
        """Start the ranks and see them to their end.

        Raises:
            RunError: a rank could not be started; those that were have been killed.
        """
        try:
            clear_reports(self._request.run_dir)
            self._start()
            self._selector.register(self._inbox, selectors.EVENT_READ, self._take_signals)
            while self._any_running():
                self._turn()
            self._display.update(self._board.read())
            return self._describe_end()
        finally:
            self._close()

    def _start(self) -> None:
        self._client.open()
        while not self._client.wait(self._inbox.fileno()):
            self._take_signals()
            if self._mode is not _Mode.RUNNING:
                return
        if self._client.problem and self._number == 0:
            problem = self._client.problem
            self._display.message(f"ranks are started one by one; the process to fork them from failed: {problem}")
        for rank in range(self._request.num_ranks):
            environment = rank_environment(
                self._request, rank=rank, generation=self._number, board_fd=self._board.fd, store=self._store.path
            )
            process = start_rank(
                self._request,
                rank=rank,
                board=self._board,
                environment=environment,
                store=self._store,
                client=self._client,
            )
            self._ranks.append(process)
            process.log.write([f"--- rank {rank}, generation {self._number}, pid {process.pid} ---".encode()])
            for fd, stream in process.streams.items():
                self._selector.register(fd, selectors.EVENT_READ, partial(self._read, fd, stream))
            if process.pid_fd >= 0:
                self._selector.register(process.pid_fd, selectors.EVENT_READ, partial(self._notice_end, process))

    def _any_running(self) -> bool:
        if self._mode is _Mode.KILLING and self._deadline is not None and self._deadline.is_over:
            left = [process for process in self._ranks if process.is_running]
            for process in left:
                self._display.message(
                    f"rank {process.rank} (process {process.pid}) does not end even when killed; it is left behind"
                )
            return False
        return any(process.is_running for process in self._ranks)

    def _turn(self) -> None:
        limit = _LOOK_EVERY_S if self._deadline is None else min(_LOOK_EVERY_S, self._deadline.remaining)
        for key, _ in self._selector.select(limit):
            # An earlier event of the same turn may have ended the rank and closed what this one is about.
            if key.fileobj in self._selector.get_map():
                action: Callable[[], None] = key.data
                action()
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
                self._selector.unregister(fd)
                return
            most -= len(data)

    def _show(self, text: str | None) -> None:
        if text is not None:
            self._display.message(text)

    def _notice_end(self, process: RankProcess) -> None:
        if not process.reap():
            return
        # Not until end of file: a process that the rank started may hold the pipe open for ever.
        for fd, stream in process.streams.items():
            if fd in self._selector.get_map():
                self._read(fd, stream, most=_DRAIN_BYTES)
            if fd in self._selector.get_map():
                self._show(stream.finish())
                self._selector.unregister(fd)
        if process.pid_fd >= 0:
            self._selector.unregister(process.pid_fd)
        process.close()
        end = self._describe_rank(process)
        code = end.exit_code
        if end.is_complete or self._mode >= _Mode.FAILING:
            return
        if end.is_orderly:
            self._enter(_Mode.STOPPING, self._request.config.stop_grace)
        elif code is not None and code < 0 and code != -signal.SIGABRT and -code not in process.signals_sent:
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
        for process in self._ranks:
            process.send(signal.SIGTERM)

    def _kill_all(self) -> None:
        for process in self._ranks:
            process.kill()
        self._enter(_Mode.KILLING, _KILL_WITHIN_S)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > _PAUSE_S:
            self._awake_since = now  # we were stopped ourselves, so old heartbeats prove nothing
        self._looked_at = now
        states = self._board.read()
        for process, state in zip(self._ranks, states, strict=True):
            if state.phase_count != self._progress[process.rank][0]:
                self._progress[process.rank] = (state.phase_count, now)
            if process.is_running:
                process.resident_bytes = resident_bytes(process.pid) or process.resident_bytes
                if process.pid_fd < 0:
                    self._notice_end(process)
        self._display.update(states)
        if self._mode is _Mode.RUNNING:
            self._look_for_hang(now)

    def _look_for_hang(self, now: float) -> None:
        watched = [
            Watched(
                state=self._board.of_rank(process.rank).read(),
                started_at=process.started_at,
                progress_at=self._progress[process.rank][1],
                is_running=process.is_running,
            )
            for process in self._ranks
        ]
        hang = find_hang(watched, now=now, awake_since=self._awake_since, config=self._request.config)
        if hang is None:
            return
        is_stopped = process_state(self._ranks[hang.rank].pid) in ("T", "t")
        self._hang = Hang(rank=hang.rank, reason=f"{hang.reason}, the process is stopped") if is_stopped else hang
        self._ask_for_stacks(self._ranks)
        self._enter(_Mode.FAILING, COLLECT_S)

    def _ask_for_stacks(self, processes: Sequence[RankProcess]) -> None:
        for process in processes:
            # One that is still starting would die of the signal, and could not say what it dies of.
            if process.is_running and catches_signal(process.pid, STACK_SIGNAL):
                process.stderr.expect_stacks()
                process.send(STACK_SIGNAL)

    def _is_absent(self, process: RankProcess) -> bool:
        """Whether others may have waited for this rank in vain: it runs, does not wait itself and has not said why it fails."""
        is_busy = process.is_running and not is_waiting(self._board.of_rank(process.rank).read().phase)
        return is_busy and read_report(self._request.run_dir, process.rank) is None

    def _describe_end(self) -> GenerationEnd:
        killed_now = count_oom_kills()
        return GenerationEnd(
            ends=[self._describe_rank(process) for process in self._ranks],
            stop_signal=self._stop_signal,
            hang=self._hang,
            oom_kills=killed_now - self._oom_kills if killed_now is not None and self._oom_kills is not None else 0,
        )

    def _describe_rank(self, process: RankProcess) -> RankEnd:
        state = self._board.of_rank(process.rank).read()
        return RankEnd(
            rank=process.rank,
            exit_code=process.exit_code,
            ended_at=process.ended_at or time.time(),
            step=state.step,
            phase=state.phase,
            phase_count=state.phase_count,
            final_status=state.final_status,
            stop_signal=state.stop_signal,
            last_step=self._request.last_step,
            signals_sent=frozenset(process.signals_sent),
            report=read_report(self._request.run_dir, process.rank),
            resident_bytes=process.resident_bytes,
            tail=process.stderr.tail,
            log=str(process.log.path),
        )

    def _close(self) -> None:
        """Leave nothing: reached in order, or because a rank could not be started or the display broke."""
        self._kill_all()
        deadline = Deadline(seconds=_KILL_WITHIN_S)
        for process in self._ranks:
            while process.is_running and not process.reap() and not deadline.is_over:
                time.sleep(0.005)
            process.close()
        self._selector.close()
        self._board.close()
        self._store.close()
