"""One start of the ranks of a run on several hosts, as the coordinator sees it; ``launch/ranks.py`` has that of one host.

RUNNING    the first rank that ends and has not said that it is done leads to FAILING, a lost host to KILLING
           (in a run that goes on when ranks die only when it cannot: see ``elastic.py``)
STOPPING   ranks were asked to finish their step and save
FAILING    a rank failed; ranks of all hosts have a second to say what they saw
KILLING    everything was ordered to be killed; a host that does not confirm it is given up
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args

from shoal.comm.store.messages import Ask
from shoal.comm.store.table import StoreTable
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.core.rundir import RunDir
from shoal.launch.blame import GenerationEnd, Outcome, RankEnd
from shoal.launch.config import ProcessConfig
from shoal.launch.failurereport import say_stopping
from shoal.launch.group.generations import run_generations
from shoal.launch.group.livefile import LiveProcess
from shoal.launch.group.request import THREADS_THERE, LaunchRequest
from shoal.launch.hangs import Hang, HangWatch, Member
from shoal.launch.hosts.clocks import wrong_clocks
from shoal.launch.hosts.connection import Connection
from shoal.launch.hosts.coordinator import Coordinator, Fleet, Interrupted
from shoal.launch.hosts.elastic import HostsGroup
from shoal.launch.hosts.messages import (
    Ended,
    Failed,
    GenerationEnded,
    Lost,
    Order,
    Output,
    Paced,
    Reading,
    Said,
    Start,
    Status,
)
from shoal.launch.hosts.returning import ReturningHosts
from shoal.launch.ranks import COLLECT_S
from shoal.launch.supervisor import KILL_SECONDS, ORDER_FAIL, ORDER_KILL, ORDER_STACKS, SignalInbox
from shoal.telemetry.eventlog import append_event
from shoal.telemetry.statusboard import FinalStatus, StatusReading

_TURN_SECONDS = 0.1
_LOOK_SECONDS = 0.2
_SLACK_SECONDS = 5.0
"""How much longer than an agent the coordinator waits for what both have a deadline for."""
_NEVER = 1e9


def supervise_hosts(request: LaunchRequest, fleet: Fleet) -> Outcome:
    """Start the ranks of a request on several hosts and stay with them until all have ended.

    Raises:
        RequestError: a host cannot be reached, or does not fit to the others, or to the run directory.
        RunError: a rank could not be started, or a host does not come back for a restart.
    """
    with SignalInbox() as inbox:
        coordinator = Coordinator(
            fleet, inbox, lease_seconds=request.config.lease_seconds, show=request.display.message
        )
        try:
            coordinator.gather()
            coordinator.enter(os.path.abspath(request.run_dir), why_shared=request.why_shared)
            for problem in wrong_clocks(coordinator.measure_clocks()):
                request.display.message(f"warning: {problem}")
            return run_generations(request, lambda number: HostGeneration(request, number, coordinator).run())
        except Interrupted as interrupted:
            request.display.message(say_stopping(interrupted.number, 0.0, has_ranks=False))
            return Outcome(status="interrupted", signal=interrupted.number)
        finally:
            request.display.close()
            coordinator.close()


class _Mode(IntEnum):
    RUNNING = 0
    STOPPING = 1
    FAILING = 2
    KILLING = 3


class HostGeneration:
    """The ranks of one start on all hosts. ``run`` returns when none of them is left."""

    def __init__(self, request: LaunchRequest, number: int, coordinator: Coordinator) -> None:
        self._request = request
        self._number = number
        self._coordinator = coordinator
        self._display = request.display
        self._table = StoreTable()
        # More than there are ranks at first where hosts have room for spares.
        self._num_slots = max(request.num_ranks, sum(len(one.ranks) for one in coordinator.connections))
        self._states = [StatusReading(rank=rank) for rank in range(self._num_slots)]
        self._ended: dict[int, RankEnd] = {}
        self._ends: dict[str, GenerationEnd] = {}
        self._mode = _Mode.RUNNING
        self._deadline: Deadline | None = None
        self._stop_signal: int | None = None
        self._hang: Hang | None = None
        self._failure: RequestError | RunError | None = None
        # Whether a rank beats is for its host to see; whether all stand still, only for who sees all.
        alone = {"start_deadline": _NEVER, "heartbeat_deadline": _NEVER}
        self._watch = HangWatch(request.config.model_copy(update=alone))
        self._looked_at = time.monotonic()
        self._group: HostsGroup | None = None
        self._threads = 0
        is_awaited = request.build_policy is not None and request.takes_hosts
        self._returning = (
            ReturningHosts(coordinator, Path(os.path.abspath(request.run_dir)), tell=self._display.message)
            if is_awaited
            else None
        )
        self._absolved: list[RankEnd] = []
        """Ends of ranks whose group went on, or tried to."""

    def run(self) -> GenerationEnd:
        """Start the ranks and see them to their end.

        Raises:
            RequestError: an agent could not do what it was asked.
            RunError: the same, or a lost host did not come back.
            Interrupted: a signal came before ranks were started again.
        """
        if self._number:
            self._coordinator.return_lost()
        self._group = self._build_group()
        self._threads = self._choose_threads()
        for connection in self._coordinator.connections:
            if not connection.lost:
                connection.send(self._start(connection, self._threads))
        try:
            while self._waiting():
                self._turn()
        finally:
            if self._returning is not None:
                self._returning.close()
        self._display.update(self._states)
        self._tell_live()
        if self._failure is not None:
            raise self._failure
        return self._describe_end()

    def _build_group(self) -> HostsGroup | None:
        build, connections = self._request.build_policy, self._coordinator.connections
        if build is None:
            return None
        events = RunDir(self._request.run_dir).supervisor_events
        return HostsGroup(
            build([one.name for one in connections]),
            connections,
            generation=self._number,
            report=lambda event: append_event(events, event, rank=None),
            tell=self._display.message,
            on_view=lambda epoch: self._table.move_on(f"epoch-{epoch}/"),
        )

    def _choose_threads(self) -> int:
        """The same number on every host, so that a replica's arithmetic does not depend on where it runs."""
        hosts = self._coordinator.connections
        cores = [max(1, one.hello.cores // len(one.ranks)) for one in hosts if one.hello is not None]
        return self._request.threads or min(cores)

    def _start(self, connection: Connection, threads: int) -> Start:
        request = self._request
        interface = self._coordinator.interfaces[connection.name]
        return Start(
            generation=self._number,
            argv=tuple(request.argv),
            module=request.module,
            arguments=tuple(request.arguments),
            shared=tuple(str(threads) if word == THREADS_THERE else word for word in request.shared),
            num_ranks=self._num_slots,
            ranks=connection.ranks,
            run_dir=os.path.abspath(request.run_dir),
            run_id=request.run_id,
            config=request.config.model_dump_json(include=set(ProcessConfig.model_fields)),
            last_step=request.last_step,
            threads=threads,
            env={
                "GLOO_SOCKET_IFNAME": interface.name,
                "SHOAL_THREADS": str(threads),
                "SHOAL_HOST": connection.name,
                "TORCHELASTIC_MAX_RESTARTS": str(request.config.max_restarts),
                **request.env,
            },
            members=() if self._group is None else self._group.members_of(connection),
        )

    def _waiting(self) -> list[Connection]:
        """The hosts whose ranks may still run."""
        return [one for one in self._coordinator.connections if one.name not in self._ends and not one.lost]

    def _turn(self) -> None:
        for connection, message in self._coordinator.turn(_TURN_SECONDS):
            if self._returning is None or not self._returning.take(connection, message):
                self._take(connection, message)
        self._table.expire()
        self._take_signals()
        for connection in self._coordinator.connections:
            if connection.lost and self._mode < _Mode.FAILING and connection.name not in self._ends:
                self._notice_loss(connection)
        if self._group is not None and self._mode is _Mode.RUNNING and not self._group.is_over:
            self._group.look()
            self._follow(self._group)
            for old, new in [] if self._returning is None else self._returning.turn():
                self._coordinator.admit(old, new)
                self._ends.pop(new.name, None)
                new.send(self._start(new, self._threads))
                self._group.host_came(old, new)
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._look()
        if self._deadline is not None and self._deadline.is_over:
            if self._mode < _Mode.KILLING:
                self._kill_all()
            else:
                for connection in self._waiting():
                    self._coordinator.lose(connection, f"it did not end its ranks within {self._deadline.seconds:g} s")

    def _notice_loss(self, connection: Connection) -> None:
        """A host is gone: the others go on, or all end."""
        group = self._group
        if group is not None and (group.is_over or self._mode is _Mode.RUNNING):
            slots = group.slots_of(connection)
            if group.host_lost(connection) and not group.is_over:
                self._absolved += [self._unseen_end(rank) for rank in slots]
                self._follow(group)
            if group.gave_up is None:
                return
        if self._request.survives_hosts and connection is not self._coordinator.connections[0]:
            self._ends[connection.name] = GenerationEnd(ends=[])
            named = ", ".join(map(str, connection.ranks))
            self._display.message(f"lost host {connection.name} (ranks {named}): {connection.lost}; the others go on")
            return
        self._hang = Hang(rank=connection.ranks[0], reason=connection.lost, is_host=True)
        self._kill_all()

    def _follow(self, group: HostsGroup) -> None:
        if group.gave_up is not None and self._mode is _Mode.RUNNING:
            self._display.message(f"the run cannot go on: {group.gave_up}")
            self._kill_all()

    def _take(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Ask):
            self._table.ask(message, connection.send)
        elif isinstance(message, Output):
            self._show(message)
        elif isinstance(message, Failed):
            kind = RequestError if message.is_request else RunError
            self._failure = self._failure or kind(f"host {connection.name}: {message.text}")
            self._ends[connection.name] = GenerationEnd(ends=[])
            self._kill_all()
        elif message.generation != self._number:
            return
        elif isinstance(message, Status):
            for reading in message.readings:
                if reading.rank in connection.ranks:
                    self._states[reading.rank] = _read(reading)
        elif isinstance(message, Ended):
            self._notice_end(connection, message.end)
        elif isinstance(message, Paced):
            if self._group is not None:
                self._group.paced(message)
        elif isinstance(message, Said | Lost):
            if self._group is not None and self._mode is _Mode.RUNNING and not connection.lost:
                self._group.said(message) if isinstance(message, Said) else self._group.lost(message)
                self._follow(self._group)
        elif isinstance(message, GenerationEnded):
            self._ends[connection.name] = message.end

    def _show(self, output: Output) -> None:
        if not output.is_stdout or self._request.output is None:
            self._display.message(output.text)
            return
        with contextlib.suppress(OSError, ValueError):
            print(output.text, file=self._request.output, flush=True)

    def _notice_end(self, connection: Connection, end: RankEnd) -> None:
        if end.rank not in connection.ranks:
            return
        self._ended[end.rank] = end
        if self._group is not None and self._goes_on(self._group, end):
            return
        if end.is_complete or self._mode >= _Mode.FAILING:
            return
        code = end.exit_code
        if end.is_orderly:
            self._enter(_Mode.STOPPING, self._request.config.stop_grace + _SLACK_SECONDS)
        elif code is not None and code < 0 and code != -signal.SIGABRT and not end.was_ended_by_us:
            self._kill_all()
        else:
            self._order(ORDER_FAIL)
            self._enter(_Mode.FAILING, COLLECT_S + _SLACK_SECONDS)

    def _goes_on(self, group: HostsGroup, end: RankEnd) -> bool:
        """Whether others may go on after the end of a rank; its agent says more of it in a moment."""
        if end.is_complete:
            group.finish()
        is_hopeless = end.report is not None and end.report.exit in ("request", "final")
        if group.is_over or self._mode is not _Mode.RUNNING or end.is_orderly or is_hopeless:
            return group.is_over
        self._absolved.append(replace(end, signals_sent=frozenset()))
        return True

    def _take_signals(self) -> None:
        for number in self._coordinator.inbox.take():
            self._stop_signal = self._stop_signal or number
            if self._mode is _Mode.RUNNING:
                grace = self._request.config.stop_grace
                self._display.message(say_stopping(number, grace, has_ranks=True))
                self._order(signal.SIGTERM)
                self._enter(_Mode.STOPPING, grace + _SLACK_SECONDS)
            elif number == signal.SIGINT and self._mode < _Mode.KILLING:
                self._display.message("stopping at once")
                self._kill_all()

    def _look(self) -> None:
        now = self._looked_at = time.monotonic()
        group = self._group
        states = self._states if group is None else [self._states[slot] for slot in group.present]
        self._display.update(states)
        self._tell_live()
        members = [
            Member(state=state, pid=state.pid, is_running=group is not None or state.rank not in self._ended)
            for state in states
        ]
        hang = self._watch.look(members, now=now)
        if hang is not None and group is not None and self._mode is _Mode.RUNNING:
            group.end(hang.rank, f"it hung: {hang.reason}")
        elif hang is not None and self._mode is _Mode.RUNNING:
            self._hang = hang
            self._order(ORDER_STACKS)
            self._order(ORDER_FAIL)
            self._enter(_Mode.FAILING, COLLECT_S + _SLACK_SECONDS)

    def _tell_live(self) -> None:
        if self._request.live is not None:
            taken = None if self._group is None else set(self._group.present)
            self._request.live.update(
                [
                    LiveProcess(
                        state=self._states[rank],
                        host=one.name,
                        pid=self._states[rank].pid,
                        is_running=not one.lost and rank not in self._ended and one.name not in self._ends,
                    )
                    for one in self._coordinator.connections
                    for rank in one.ranks
                    if taken is None or rank in taken
                ],
                generation=self._number,
            )

    def _kill_all(self) -> None:
        if self._mode < _Mode.KILLING:
            self._order(ORDER_KILL)
            self._enter(_Mode.KILLING, KILL_SECONDS + _SLACK_SECONDS)

    def _order(self, number: int) -> None:
        for connection in self._waiting():
            connection.send(Order(generation=self._number, number=number))

    def _enter(self, mode: _Mode, seconds: float) -> None:
        if mode > self._mode:
            self._mode, self._deadline = mode, Deadline(seconds=seconds)

    def _describe_end(self) -> GenerationEnd:
        ends: dict[int, RankEnd] = {}
        for connection in self._coordinator.connections:
            host = self._ends.get(connection.name)
            known: Sequence[RankEnd] = host.ends if host is not None else ()
            ended = {**{rank: self._ended[rank] for rank in connection.ranks if rank in self._ended}}
            ended |= {end.rank: end for end in known if end.rank in connection.ranks}
            for rank in connection.ranks:
                ends[rank] = _on_host(ended.get(rank) or self._unseen_end(rank), connection)
        hosts = self._ends.values()
        return GenerationEnd(
            ends=self._judged(ends),
            stop_signal=self._stop_signal or next((end.stop_signal for end in hosts if end.stop_signal), None),
            hang=self._hang or next((end.hang for end in hosts if end.hang is not None), None),
            oom_kills=sum(end.oom_kills for end in hosts),
        )

    def _judged(self, ends: Mapping[int, RankEnd]) -> list[RankEnd]:
        """The ends that a run is judged by; of one that went on when ranks died, of those who took part at last, and where it
        could not go on, of the last one lost."""
        group = self._group
        if group is not None and group.is_over:
            return [ends[slot] for slot in sorted(group.present) if ends[slot].is_complete]
        if group is not None and self._hang is None:
            last = {end.rank: end for end in self._absolved[-1:]} if group.gave_up is not None else {}
            hosts = {rank: one for one in self._coordinator.connections for rank in one.ranks}
            lost = [_on_host(end, hosts[end.rank]) for end in last.values()]
            return [*lost, *(ends[slot] for slot in sorted(group.present) if slot not in last)]
        left_out = {rank for one in self._coordinator.connections if self._is_done_without(one) for rank in one.ranks}
        return [ends[rank] for rank in sorted(ends) if rank not in left_out]

    def _is_done_without(self, connection: Connection) -> bool:
        return self._request.survives_hosts and bool(connection.lost) and self._hang is None

    def _unseen_end(self, rank: int) -> RankEnd:
        """Of a rank whose host was lost: where it was when it was last heard of."""
        state = self._states[rank]
        return RankEnd(
            rank=rank,
            exit_code=None,
            ended_at=time.time(),
            step=state.step,
            phase=state.phase,
            phase_count=state.phase_count,
            last_step=self._request.last_step,
        )


def _on_host(end: RankEnd, connection: Connection) -> RankEnd:
    """The end with its host, and its times by this machine's clock: they are compared with those of other hosts."""
    offset = connection.clock_offset
    report = end.report
    if report is not None:
        report = replace(report, time=report.time - offset)
    return replace(end, host=connection.name, ended_at=end.ended_at - offset, report=report)


def _read(reading: Reading) -> StatusReading:
    try:
        metrics = json.loads(reading.metrics)
    except ValueError:
        metrics = {}
    final: FinalStatus = reading.final_status if reading.final_status in get_args(FinalStatus) else ""  # type: ignore[assignment]
    return StatusReading(
        rank=reading.rank,
        pid=reading.pid,
        heartbeat=None if reading.age < 0 else time.monotonic() - reading.age,
        step=reading.step,
        phase=reading.phase,
        phase_count=reading.phase_count,
        metrics=metrics if isinstance(metrics, dict) else {},
        final_status=final,
        stop_signal=reading.stop_signal,
    )
