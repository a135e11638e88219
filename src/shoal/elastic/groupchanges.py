"""What can happen to the membership of an elastic run, and what is to be done about it. Values only; ``group.py`` decides."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.elastic.groupview import GroupView

# ---- events --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A process of a replica is there. Telling it again is harmless."""

    member: str
    """Its id, of this start of the process."""
    replica: str
    host: str
    now: float
    position: int = 0
    """Its place among the processes of the replica."""
    spare: bool = False
    """True when it was started to wait, and not because a replica was missing."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A process can take part at the next step: a newcomer has a recent state, a spare is warm, the first ones are built."""

    member: str
    now: float


@dataclass(frozen=True, kw_only=True)
class Died:
    """The process that started it saw it end, also where it was told to end it. Nobody waits for a lease here."""

    member: str
    cause: str
    now: float
    replica: str = ""
    """Where it is known: one that dies before it joins ends the order that started it."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """A process asks to be left out, because it was told to go (SIGTERM before a machine is taken away). Not held against its
    host."""

    member: str
    reason: str
    now: float
    replica: str = ""
    """As in ``Died``."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A sign of life of a host's agent, which stands for all processes there. It is answered, and the answer is the host's
    lease."""

    host: str
    now: float
    slots: int | None = None
    """How many replicas the host has room for; None leaves that as it was told before, and no replica is ordered where it was
    not."""
    epoch: int | None = None
    """Of the newest view that reached the host; None where views cannot be lost."""
    replicas: tuple[str, ...] | None = None
    """Those that were started there, so that an order that was lost is given again; None where orders cannot be lost."""
    agent: str = ""
    """The id of this start of the agent. Its processes die with an agent: where another one speaks, they are dead."""
    members: tuple[str, ...] = ()
    """The processes that run there, so that those that were expelled while the host was cut off are found."""


@dataclass(frozen=True, kw_only=True)
class HeardAgain:
    """Signs of life of many hosts at once, of which there is nothing else to tell: one step a turn for thousands of them."""

    agents: Mapping[str, str]
    """By host, the id of the agent that speaks for it."""
    now: float


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A process saw a collective fail, or could not assemble under a view. If somebody died, that is told as well, and sooner or
    later than this; if nobody did, it was a passing fault: the same replicas go on under a new epoch, and redo the step."""

    member: str
    epoch: int
    """Under which it happened; what is said of an earlier one is not heard."""
    now: float
    suspects: tuple[str, ...] = ()
    """The hosts that it could not reach, or waited for in vain; none where it cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A process is so much slower than the others that it is to be left out, if there are enough without it
    (``stragglers.py``)."""

    member: str
    reason: str
    now: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run has done all its steps."""

    now: float


@dataclass(frozen=True, kw_only=True)
class Ticked:
    """Time went on. To be given several times within ``lease_seconds``: a gap is taken for a pause of the coordinator itself."""

    now: float


Event = Joined | Ready | Died | Left | Heard | Failed | Slow | Ended | Ticked | HeardAgain

# ---- instructions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Tell every host the new view."""

    view: GroupView
    cause: str
    """What changed, in people's words."""
    is_retry: bool = False
    """True when nobody came or went: the step that failed is done again."""


@dataclass(frozen=True, kw_only=True)
class Remind:
    """Tell one host the present view again: it has missed it."""

    host: str
    view: GroupView


@dataclass(frozen=True, kw_only=True)
class Order:
    """Start the processes of a replica on a host. They join by themselves. Given twice it is followed once."""

    replica: str
    host: str
    spare: bool


@dataclass(frozen=True, kw_only=True)
class Expel:
    """End a process if it still runs: it is no member any more. Doing it twice is harmless."""

    member: str
    host: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The run cannot go on."""

    reason: str


Instruction = Publish | Remind | Order | Expel | GiveUp
