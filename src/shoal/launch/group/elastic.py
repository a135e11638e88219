"""The supervisor's part in a run that goes on when ranks die: who is in which slot, what was published, what is to be done.

Who takes part is decided elsewhere (``GroupPolicy``; a pure state machine stands behind it), because this room knows processes
and not plans. Here events of processes become words to the policy, and its answers become views on the control board, processes
to start and processes to end. A *slot* is a place on the boards; a *member* is one start of one process in it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.comm.store.file import StoreFile
from shoal.core.events import Event, ViewChanged
from shoal.launch.group.control import ControlBoard, Pace

SECOND_START = ", start"
"""In the name of a member that was started in the slot of another."""
_KEPT_STORES = 64
"""Of the last views: a rank may be on its way to an older one. Of every view, they would use up the files that may be open."""
CONTROL_VARIABLE, MEMBER_VARIABLE = "SHOAL_CONTROL_FD", "SHOAL_MEMBER"


@dataclass(frozen=True, kw_only=True)
class NewView:
    """Tell every rank."""

    epoch: int
    replicas: Sequence[Sequence[str]]
    """The members of each, in the order of ranks."""
    num_logical: int
    cause: str
    is_retry: bool = False
    """Nobody came or went."""
    hosts: Sequence[str] = ()
    """Of each replica, where there are several."""


@dataclass(frozen=True, kw_only=True)
class StartReplica:
    """Start the processes of a replica."""

    name: str
    spare: bool
    host: str = ""
    """Where, if there are several."""


@dataclass(frozen=True, kw_only=True)
class EndMember:
    """End a process that is no member any more, if it runs."""

    member: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Show the user a line, and write an event."""

    text: str
    event: Event


Action = NewView | StartReplica | EndMember | GiveUp | Tell


class GroupPolicy(Protocol):
    """Decides who takes part. Each method is told of an event, and returns what is to be done about it."""

    @property
    def num_replicas(self) -> int:
        """Replicas to begin with."""

    @property
    def replica_size(self) -> int:
        """Processes of a replica."""

    @property
    def num_slots(self) -> int:
        """Processes that may run at once."""

    def joined(
        self, member: str, *, replica: str, position: int, spare: bool, host: str | None = None
    ) -> Sequence[Action]:
        """A process of a replica was started; on this host, unless another is named."""

    def ready(self, member: str) -> Sequence[Action]:
        """It can take part."""

    def died(self, member: str, cause: str) -> Sequence[Action]:
        """It ended, or was ended because it hung."""

    def left(self, member: str, reason: str) -> Sequence[Action]:
        """It cannot be reached any more; whether it has ended is not known."""

    def heard(self, host: str, *, agent: str, slots: int) -> Sequence[Action]:
        """A host gave a sign of life: the id of the agent that speaks for it, and how many processes have room there."""

    def heard_again(self, agents: Mapping[str, str]) -> Sequence[Action]:
        """Hosts gave a further sign of life: for each the id of the agent that speaks for it."""

    def failed(self, member: str, epoch: int, suspects: Sequence[str] = ()) -> Sequence[Action]:
        """It saw a collective fail under a view; the hosts that it could not reach."""

    def paced(self, paces: Mapping[str, Pace]) -> Sequence[Action]:
        """What kept members busy so far."""

    def ticked(self) -> Sequence[Action]:
        """Time went on."""

    def ended(self) -> Sequence[Action]:
        """The run has done all its steps."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A process to start."""

    slot: int
    member: str


class Group(Protocol):
    """What a supervisor of ranks asks about a group that goes on when some die, wherever that is decided."""

    control: ControlBoard
    host: str
    """What this host is called."""
    gave_up: str | None
    """Why the run cannot go on; None while it can."""
    is_over: bool
    """A rank has said that all is done."""

    @property
    def may_start_more(self) -> bool:
        """Whether processes may be started here though none runs."""

    @property
    def present(self) -> Sequence[int]:
        """The slots of the ranks of this host that take part."""

    def environment(self, start: Start) -> Mapping[str, str]:
        """What a process is told beside its place."""

    def take_starts(self) -> Sequence[Start]:
        """Processes to start, once."""

    def take_ends(self) -> Sequence[tuple[int, str]]:
        """Slots whose processes are to be ended, with the reason, once."""

    def look(self) -> None:
        """Hear what ranks have said since the last look."""

    def lost(self, slot: int, cause: str) -> None:
        """The process in a slot has ended before the run was done."""

    def finish(self) -> None:
        """A rank has done all there was to do."""

    def close(self) -> None:
        """Let go of the memory."""


class ElasticGroup:
    """The group of one generation of ranks, where all are on this host.

    Args:
        policy: decides.
        report: takes the events.
        tell: shows the user a line.
        host: what this host is called.
    """

    def __init__(
        self, policy: GroupPolicy, *, report: Callable[[Event], object], tell: Callable[[str], None], host: str
    ) -> None:
        self._policy, self._report, self._tell, self.host = policy, report, tell, host
        self.may_start_more = False
        self.control = ControlBoard.create(policy.num_slots)
        self.gave_up: str | None = None
        """Why the run cannot go on; None while it can."""
        self.is_over = False
        """A rank has said that all is done."""
        self.num_views = 0
        self._slots: dict[str, int] = {}
        """Of the members that live."""
        self._members: dict[int, str] = {}
        self._ready: set[str] = set()
        self._failed: dict[str, int] = {}
        self._view: tuple[str, ...] = ()
        self._starts: Counter[int] = Counter()
        self._to_start: list[Start] = []
        self._to_end: list[tuple[int, str]] = []
        self._waiting: list[StartReplica] = []
        """Those that are to be started when the processes before them are gone: until then their slots are taken."""
        self._stores: list[StoreFile] = []
        for number in range(policy.num_replicas):
            self._take_slots(f"replica-{number}", spare=False)

    @property
    def present(self) -> list[int]:
        """The slots of the ranks of the present view, in the order of ranks; before the first, of all that were started."""
        return [self._slots[member] for member in self._view if member in self._slots] or sorted(self._members)

    def environment(self, start: Start) -> Mapping[str, str]:
        """What a process is told beside its place."""
        return {CONTROL_VARIABLE: str(self.control.fd), MEMBER_VARIABLE: start.member}

    def take_starts(self) -> list[Start]:
        """Processes to start, once."""
        found, self._to_start = self._to_start, []
        return found

    def take_ends(self) -> list[tuple[int, str]]:
        """Slots whose processes are to be ended, with the reason, once."""
        found, self._to_end = self._to_end, []
        return found

    def look(self) -> None:
        """Hear what ranks have said since the last look."""
        paces = {}
        for member, slot in list(self._slots.items()):
            said = self.control.answers(slot)
            if said.is_ready and member not in self._ready:
                self._ready.add(member)
                self._do(self._policy.ready(member))
            if said.failed > self._failed.get(member, 0):
                self._failed[member] = said.failed
                self._do(self._policy.failed(member, said.failed))
            paces[member] = said.pace
        self._do(self._policy.paced(paces))
        self._do(self._policy.ticked())

    def lost(self, slot: int, cause: str) -> None:
        """The process in a slot has ended before the run was done."""
        member = self._members.pop(slot, None)
        if member is not None:
            del self._slots[member]
            self._do(self._policy.died(member, cause))
            self._start_waiting()

    def finish(self) -> None:
        """A rank has done all there was to do, so that all have passed the last barrier: nobody is needed any more."""
        if not self.is_over:
            self.is_over = True
            self._do(self._policy.ended())

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self.control.close()
        for store in self._stores:
            store.close()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting += [one for one in waiting if not self._take_slots(one.name, spare=one.spare)]

    def _take_slots(self, replica: str, *, spare: bool) -> bool:
        """Have the processes of a replica started; False while there is no room for them."""
        size = self._policy.replica_size
        blocks = range(self._policy.num_slots // size)
        free = next(
            (block for block in blocks if not any(block * size + place in self._members for place in range(size))), None
        )
        if free is None:
            return False
        for position in range(size):
            slot = free * size + position
            self._starts[slot] += 1
            again = f"{SECOND_START} {self._starts[slot]}" if self._starts[slot] > 1 else ""
            member = f"rank {slot}{again}"
            self.control.clear(slot)
            self._slots[member], self._members[slot] = slot, member
            self._to_start.append(Start(slot=slot, member=member))
            self._do(self._policy.joined(member, replica=replica, position=position, spare=spare))
        return True

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, NewView):
                self._publish(action)
            elif isinstance(action, StartReplica):
                self._tell(f"starting {'a spare' if action.spare else 'a replica'}, {action.name}, on {self.host}")
                self._waiting.append(action)
                self._start_waiting()
            elif isinstance(action, EndMember):
                if action.member in self._slots:
                    self._to_end.append((self._slots[action.member], action.reason))
            elif isinstance(action, Tell):
                self._report(action.event)
                self._tell(action.text)
            else:
                self.gave_up = action.reason

    def _publish(self, view: NewView) -> None:
        members = tuple(member for replica in view.replicas for member in replica)
        # The number of a closed one is given to other files, which whoever opens it late sees (``RecordFileStore``).
        self._stores.append(store := StoreFile())
        if len(self._stores) > _KEPT_STORES:
            self._stores.pop(0).close()
        text = view_text(view, slots=[self._slots[member] for member in members], store=store.shared_path)
        before, self._view = set(self._view), members
        self.num_views += 1
        self.control.publish(view.epoch, text)
        self._report(view_event(view, hosts=[self.host]))
        if view.epoch > 1:
            self._tell(tell_view(view, is_lost=bool(before - set(members))))


def view_text(view: NewView, *, slots: Sequence[int], store: str) -> str:
    """A view as ranks read it.

    Args:
        view: what was decided.
        slots: of its members, in the order of ranks.
        store: the path where they meet; empty where they meet at the agents of their hosts.
    """
    values = {
        "epoch": view.epoch,
        "members": [member for replica in view.replicas for member in replica],
        "num_replicas": len(view.replicas),
        "num_logical": view.num_logical,
        "slots": list(slots),
        "store": store,
        "hosts": list(view.hosts),
        "cause": view.cause,
        "is_retry": view.is_retry,
    }
    return json.dumps(values, separators=(",", ":"))


def view_event(view: NewView, *, hosts: Sequence[str]) -> ViewChanged:
    """The event that tells of a view."""
    return ViewChanged(
        epoch=view.epoch,
        replicas=len(view.replicas),
        logical=view.num_logical,
        members=[member for replica in view.replicas for member in replica],
        hosts=list(hosts),
        cause=view.cause,
        retry=view.is_retry,
    )


def tell_view(view: NewView, *, is_lost: bool) -> str:
    """The line that tells people of a view."""
    what = "the step under way is done again" if is_lost or view.is_retry else "they enter between two steps"
    return f"epoch {view.epoch}: {len(view.replicas)} of {view.num_logical} replicas go on ({view.cause}); {what}"
