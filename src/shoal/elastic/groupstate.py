"""What the coordinator of an elastic run was asked for, and what it knows: values only; ``group.py`` changes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.elastic.groupview import GroupView, Replica

Phase = Literal["gathering", "running", "over"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the run asked for."""

    num_logical: int
    """The plan's dp: replicas to begin with, and logical replicas while the global batch is held."""
    replica_size: int = 1
    """Processes of a replica."""
    min_dp: int = 1
    """With fewer replicas the run waits for more."""
    max_dp: int | None = None
    """More are not taken in; None is ``num_logical``."""
    spares: int = 0
    """Replicas that wait, warm, for the place of one that dies."""
    scales: bool = False
    """True when the global batch grows and shrinks with the replicas that are present, each of which is then a logical one."""
    drops_slow: bool = False
    """True when replicas that are told to be slow are left out."""
    lease_seconds: float = math.inf
    """A host that was silent for longer is left out. On one host there is none: the deaths of processes are all there is to
    see."""
    join_seconds: float = 120.0
    """How long the replicas have to join at the start, and the run may wait for more than ``min_dp`` later."""
    settle_seconds: float = 0.5
    """How long a failed collective waits for the news that somebody died, before it counts as a passing fault."""
    max_failures: int = 3
    """A host that failed more often within ``failure_window`` is left out."""
    failure_window: float = 3600.0

    @property
    def limit(self) -> int:
        """The most replicas that may be present."""
        return self.num_logical if self.max_dp is None else self.max_dp

    @property
    def at_start(self) -> int:
        """The replicas that the run begins with."""
        return min(self.num_logical, self.limit)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A replica whose processes come, or are there."""

    name: str
    spare: bool
    members: Mapping[int, str]
    """By position."""
    hosts: Mapping[str, str]
    """Of each member."""
    ready: frozenset[str] = frozenset()

    def is_ready(self, size: int) -> bool:
        """Whether all of its processes are there and can take part."""
        return len(self.members) == size and self.ready.issuperset(self.members.values())

    @property
    def replica(self) -> Replica:
        """The replica as a view names it."""
        members = tuple(self.members[position] for position in sorted(self.members))
        return Replica(name=self.name, members=members, host=self.hosts[members[0]])


@dataclass(frozen=True, kw_only=True)
class Host:
    """What is known of a host."""

    heard: float
    agent: str = ""
    """Of those that were started there, the one that speaks for it now."""
    former: frozenset[str] = frozenset()
    """Those before it; what they said late is not heard."""
    slots: int = 0
    failures: tuple[float, ...] = ()
    """When something failed there; those of long ago are forgotten."""
    is_out: bool = False
    """It failed too often."""
    is_silent: bool = False
    """Its lease is over, and it was not heard again."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A collective failed under the present epoch, and nobody is known to have died yet."""

    since: float
    suspected: frozenset[tuple[str, str]] = frozenset()
    """Pairs of hosts: by whom, and who."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What the coordinator knows. Never changed in place."""

    wanted: Wanted
    phase: Phase = "gathering"
    epoch: int = 0
    """Of the last view that was published."""
    view: GroupView | None = None
    earlier: tuple[tuple[str, ...], ...] = ()
    """The members of views before it that may still be gone on with, because none of them is known to have ended."""
    units: Mapping[str, Unit] = field(default_factory=dict)
    """The replicas that are there or come, by name, those of the view included."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    ordered: Mapping[str, tuple[str, bool, float]] = field(default_factory=dict)
    """Replicas that were ordered and are not ready yet: host, whether as a spare, and since when."""
    broken: frozenset[str] = frozenset()
    """Replicas that were ordered and lost a process before all had come: those that come later have to end as well."""
    departed: Mapping[str, str] = field(default_factory=dict)
    """Why each member is not in any more, by id."""
    lingering: Mapping[str, str] = field(default_factory=dict)
    """The hosts of members that were left out and are not known to have ended: not seen dead, and the host's lease is not
    over."""
    trouble: Trouble | None = None
    faults: tuple[float, ...] = ()
    """When collectives failed for which no host could be blamed."""
    num_retries: int = 0
    num_ordered: int = 0
    num_lost: int = 0
    """Replicas that were there and are gone."""
    cause: str = ""
    """What changed since the last view."""
    began: float | None = None
    """When the present gathering began."""
    now: float = 0.0
    ticked: float | None = None

    @property
    def lease_epoch(self) -> int:
        """What the answer to a sign of life names. A view that is over while no other is there yet has no lease any more: a host
        that was left out and is heard again would otherwise go on under it."""
        is_over = self.phase == "gathering" and self.view is not None
        return self.epoch + is_over
