"""The coordinator's part in a run that goes on when ranks or hosts die: who is in which slot of which host, and what is told.

Who takes part is decided by the policy (``launch/group/elastic.py``), as on one host. Its words go to the agents, and what they
tell of their ranks goes to it. Ends of processes are pushed by agents. A host whose line ends is done without at once; its ranks
count as ended when its lease is over, because an agent that the coordinator does not hear ends them sooner than that.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.core.events import Event
from shoal.launch.group.control import Pace
from shoal.launch.group.elastic import (
    SECOND_START,
    Action,
    EndMember,
    GroupPolicy,
    NewView,
    StartReplica,
    Tell,
    tell_view,
    view_event,
    view_text,
)
from shoal.launch.hosts import messages
from shoal.launch.hosts.connection import Connection


@dataclass(frozen=True, kw_only=True)
class _Place:
    slot: int
    connection: Connection


class HostsGroup:
    """The group of one generation of ranks on several hosts.

    Args:
        policy: decides.
        connections: to the hosts; they may be replaced by others of the same names later.
        generation: its number.
        report: takes the events.
        tell: shows the user a line.
        on_view: told of every epoch before the hosts are.
    """

    def __init__(
        self,
        policy: GroupPolicy,
        connections: Sequence[Connection],
        *,
        generation: int,
        report: Callable[[Event], object],
        tell: Callable[[str], None],
        on_view: Callable[[int], None],
    ) -> None:
        self._policy, self._connections, self._generation = policy, list(connections), generation
        self._report, self._tell, self._on_view = report, tell, on_view
        self.gave_up: str | None = None
        """Why the run cannot go on; None while it can."""
        self.is_over = False
        """A rank has said that all is done."""
        self._places: dict[str, _Place] = {}
        """Of the members that live, as far as is known."""
        self._waiting: list[StartReplica] = []
        """Those that are to be started when the processes before them are gone."""
        self._paces: dict[str, Pace] = {}
        self._starts: Counter[int] = Counter()
        self._ready: set[str] = set()
        self._failed: dict[str, int] = {}
        self._view: tuple[str, ...] = ()
        self._next: NewView | None = None
        """Decided, and told when everything that happened at once was heard."""
        self._heard: dict[str, float] = {}
        self._gone = [one for one in self._connections if one.lost]
        self._do([action for one in self._connections if not one.lost for action in self._hear(one)])
        size = policy.replica_size
        for number in range(policy.num_replicas):
            for position in range(size):
                self._join(number * size + position, f"replica-{number}", position, spare=False)
        self._flush()

    @property
    def present(self) -> list[int]:
        """The slots of the ranks of the present view, in the order of ranks; before the first, of all that were started."""
        found = [self._places[member].slot for member in self._view if member in self._places]
        return found or sorted(place.slot for place in self._places.values())

    def members_of(self, connection: Connection) -> tuple[str, ...]:
        """What the first processes of a host are called, in the order of its slots; empty where a slot has none yet."""
        names = {place.slot: member for member, place in self._places.items()}
        return tuple(names.get(slot, "") for slot in connection.ranks)

    def slots_of(self, connection: Connection) -> list[int]:
        """The slots of a host in which a process is, as far as is known."""
        return sorted(place.slot for place in self._places.values() if place.connection is connection)

    def host_came(self, old: Connection, new: Connection) -> None:
        """A host is there that was not: replicas may be started on it."""
        self._connections = [new if one is old else one for one in self._connections]
        self._gone = [one for one in self._gone if one is not old]
        self._tell(f"host {new.name} has come")
        self._do(self._hear(new))
        self._flush()

    def said(self, said: messages.Said) -> None:
        """A rank is ready, or has seen a collective fail."""
        if said.member not in self._places:
            return
        if said.is_ready and said.member not in self._ready:
            self._ready.add(said.member)
            self._do(self._policy.ready(said.member))
        if said.failed > self._failed.get(said.member, 0):
            self._failed[said.member] = said.failed
            suspects = [one.name for one in self._connections if said.suspect in one.ranks]
            self._do(self._policy.failed(said.member, said.failed, suspects))
        self._flush()

    def paced(self, paced: messages.Paced) -> None:
        """An agent tells what kept its ranks busy."""
        for member, (steps, compute, data) in paced.paces.items():
            if member in self._places:
                self._paces[member] = Pace(steps=steps, compute=compute, data=data)

    def lost(self, lost: messages.Lost) -> None:
        """An agent has seen a rank end, one that is no member any more included."""
        self._places.pop(lost.member, None)
        self._do(self._policy.died(lost.member, lost.cause))
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._start(action)
        self._flush()

    def host_lost(self, connection: Connection) -> bool:
        """The line to a host has ended; True when that is news."""
        if connection in self._gone:
            return False
        self._gone.append(connection)
        members = [member for member, place in self._places.items() if place.connection is connection]
        self._tell(f"lost host {connection.name} with {' and '.join(members) or 'no rank'}: {connection.lost}")
        # Nobody is started there any more.
        self._do(self._hear(connection, slots=0))
        for member in members:
            del self._places[member]
            self._do(self._policy.left(member, f"host {connection.name} is lost: {connection.lost}"))
        self._flush()
        return True

    def end(self, slot: int, reason: str) -> None:
        """End the process in a slot, which stands still; its agent tells when it has ended."""
        for member, place in self._places.items():
            if place.slot == slot:
                self._send_end(member, place, reason)

    def look(self) -> None:
        """Tell the policy who was heard, and that time went on."""
        again = [one for one in self._connections if not one.lost and one.heard > self._heard.get(one.name, 0.0)]
        if again:
            now = time.monotonic()
            self._heard |= {one.name: now for one in again}
            self._do(self._policy.heard_again({one.name: _agent_of(one) for one in again}))
        self._do(self._policy.paced({member: self._paces.get(member, Pace()) for member in self._places}))
        self._do(self._policy.ticked())
        self._flush()

    def finish(self) -> None:
        """A rank has done all there was to do, so that all have passed the last barrier: nobody is needed any more."""
        if not self.is_over:
            self.is_over = True
            self._do(self._policy.ended())
            for member, place in self._places.items():
                if member not in self._view:
                    self._send_end(member, place, "the run is over")
            self._send_all(messages.Over(generation=self._generation))

    def _hear(self, connection: Connection, slots: int | None = None) -> Sequence[Action]:
        self._heard[connection.name] = time.monotonic()
        room = len(connection.ranks) if slots is None else slots
        return self._policy.heard(connection.name, agent=_agent_of(connection), slots=room)

    def _join(self, slot: int, replica: str, position: int, *, spare: bool) -> str:
        self._starts[slot] += 1
        again = f"{SECOND_START} {self._starts[slot]}" if self._starts[slot] > 1 else ""
        member = f"rank {slot}{again}"
        connection = next(one for one in self._connections if slot in one.ranks)
        self._places[member] = _Place(slot=slot, connection=connection)
        self._do(self._policy.joined(member, replica=replica, position=position, spare=spare, host=connection.name))
        return member

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, NewView):
                before = self._next
                cause = action.cause if before is None else f"{before.cause}; {action.cause}"
                self._next = replace(action, cause=cause)
            elif isinstance(action, StartReplica):
                self._start(action)
            elif isinstance(action, EndMember):
                place = self._places.get(action.member)
                if place is not None:
                    self._send_end(action.member, place, action.reason)
            elif isinstance(action, Tell):
                self._report(action.event)
                self._tell(action.text)
            else:
                self.gave_up = self.gave_up or action.reason

    def _start(self, action: StartReplica) -> None:
        connection = next(one for one in self._connections if one.name == action.host)
        if connection in self._gone:
            return
        taken = {place.slot for place in self._places.values()}
        size = self._policy.replica_size
        blocks = [connection.ranks[first : first + size] for first in range(0, len(connection.ranks), size)]
        free = next((block for block in blocks if not taken.intersection(block)), None)
        if free is None:
            # The processes before are not gone yet.
            self._waiting.append(action)
            return
        self._tell(f"starting {'a spare' if action.spare else 'a replica'}, {action.name}, on {connection.name}")
        for position, slot in enumerate(free):
            member = self._join(slot, action.name, position, spare=action.spare)
            connection.send(messages.StartMember(generation=self._generation, slot=slot, member=member))

    def _flush(self) -> None:
        """Tell all hosts the newest view that was decided."""
        view, self._next = self._next, None
        if view is None or self.is_over:
            return
        members = tuple(member for replica in view.replicas for member in replica)
        if not self._places.keys() >= set(members):
            # Somebody was lost after it was decided, and too few are left for another one.
            return
        before, self._view = set(self._view), members
        self._on_view(view.epoch)
        text = view_text(view, slots=[self._places[member].slot for member in members], store="")
        self._send_all(messages.Publish(generation=self._generation, epoch=view.epoch, text=text))
        self._report(view_event(view, hosts=list(dict.fromkeys(view.hosts))))
        if view.epoch > 1:
            self._tell(tell_view(view, is_lost=bool(before - set(members))))

    def _send_end(self, member: str, place: _Place, reason: str) -> None:
        place.connection.send(
            messages.EndMember(generation=self._generation, slot=place.slot, member=member, reason=reason)
        )

    def _send_all(self, message: messages.ToGroup) -> None:
        for connection in self._connections:
            connection.send(message)


def _agent_of(connection: Connection) -> str:
    """The id of the agent at the other end: of this start of it."""
    process = connection.process
    return f"{connection.name}/{process.pid if process is not None else 0}"
