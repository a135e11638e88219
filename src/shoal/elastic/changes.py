"""What can happen to the membership, and what the center is told to do about it. Values only; ``membership.py`` decides."""

from dataclasses import dataclass
from typing import Literal

from shoal.elastic.view import Member, View

# ---- events --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a member told a candidate about itself before it was elected."""

    member: Member
    view: View | None = None
    """The last view it accepted; None when it never saw one."""


@dataclass(frozen=True, kw_only=True)
class Elected:
    """This candidate became the center. Everything it knew from an earlier time is forgotten."""

    epoch: int
    now: float
    reports: tuple[Report, ...] = ()
    kept: View | None = None
    """The newest view that earlier centers wrote down where this one can read it. With it no view is ever forgotten, even if all
    that had accepted it died together with the center that published it."""
    fresh: bool = False
    """True when no view can exist, because everything has just been started; otherwise the center first waits for old views."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A process asks to be a member, or tells a new center what it knows."""

    member: Member
    now: float
    view: View | None = None
    """The last view it accepted, also under an earlier id; None when it never saw one."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """A member ended: it said so itself, or the process that started it saw it end."""

    id: str
    reason: str
    now: float


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A sign of life."""

    id: str
    now: float
    epoch: int = 0
    """Of the last view it accepted."""


@dataclass(frozen=True, kw_only=True)
class Ticked:
    """Time went on. To be given several times within ``dead_seconds``: a gap is taken for a pause of the center itself."""

    now: float


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The primary says that a joining replica has everything, and that it acknowledges nothing without it from now on."""

    shard: int
    server: str
    order: int
    """As in the ``Sync`` that this answers."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The primary of a chain says that another replica of it does not follow."""

    shard: int
    server: str
    reporter: str
    epoch: int
    """Of the view in which that was so; what is said of an earlier view is not heard."""
    reason: str
    now: float


Event = Elected | Joined | Left | Heard | Ticked | Synced | Failed

# ---- instructions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Tell every member the new view. The elector must ``advance`` to its epoch first, and nothing goes out if that fails."""

    view: View


@dataclass(frozen=True, kw_only=True)
class Remind:
    """Tell one member the current view again: it has missed it."""

    id: str
    view: View


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask a process to join, with the last view it accepted."""

    id: str


@dataclass(frozen=True, kw_only=True)
class Restore:
    """No synced replica of these shards is left: every shard and the update log go back to the last checkpoint."""

    shards: tuple[int, ...]
    history: int
    """As in the view that was published with it."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """This worker left: its portions go back to todo, and what it pushed and did not commit is dropped.

    A server does the same for any worker that a view does not name any more, so a lost release costs nothing.
    """

    worker: str


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Tell the primary to make a replica. Doing it twice is harmless: an order that is done is answered again."""

    shard: int
    source: str
    target: str
    order: int


@dataclass(frozen=True, kw_only=True)
class Collect:
    """For the cleaner: nobody will ask for this any more."""

    kind: Literal["server", "worker", "replica"]
    id: str
    """Of the member that left, or of the living server with an orphaned replica."""
    shard: int | None = None
    """Of the orphaned replica."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Tell a process that it is not a member."""

    id: str
    code: Literal["departed", "replaced", "taken", "over"]
    """departed: it was taken for dead, and may join again under a new id, without what it held. replaced: another process has its
    name, and it should end. taken: so it is, and that one was there before. over: the run ended."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Let a process that asks to join ask again: another one has its name, and may be alive or not."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The run cannot go on."""

    reason: str


Instruction = Publish | Remind | Ask | Restore | Release | Sync | Collect | Refuse | Stall | GiveUp


# ---- words ---------------------------------------------------------------------------------------------------------------------


def describe_change(before: View | None, after: View, event: Event) -> str:
    """Why a view was published, for people: who came and who went, or else what happened.

    Args:
        before: the view before it, if any.
        after: the view.
        event: what it followed from.
    """
    if before is None or isinstance(event, Elected):
        return "the first view" if before is None else "another center was elected"
    known, there = {one.id for one in before}, {one.id for one in after}
    came = [one.name for one in after if one.id not in known]
    went = [one.name for one in before if one.id not in there]
    said = [f"{', '.join(came)} joined"] if came else []
    if went:
        reason = event.reason if isinstance(event, Left) else "no sign of life"
        said.append(f"{', '.join(went)} left: {reason}")
    match event:
        case Synced(shard=shard) if not said:
            return f"shard {shard} has another copy"
        case Failed(shard=shard, reason=reason) if not said:
            return f"a copy of shard {shard} was given up: {reason}"
    return "; ".join(said) or "shards were laid out anew"
