"""The center's decisions: an event goes in, a new state and a list of instructions come out. No clock, no socket, no randomness.

A center lives through four phases, and each election starts again at the first:

    standing   not elected
    settling   elected; no view is made before every member of the newest view that anybody reports was heard, or has been silent
               for ``dead_seconds``: an older view must not decide what a newer one had changed
    gathering  no view, or no server left: waiting for enough servers and a worker
    running    there is a view; each change of it is published under a new epoch

In the end it may be ``over``. A view is the only thing that must survive a center, and every member has a copy.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from shoal.elastic.changes import (
    Ask,
    Collect,
    Elected,
    Event,
    Failed,
    GiveUp,
    Heard,
    Instruction,
    Joined,
    Left,
    Publish,
    Refuse,
    Release,
    Remind,
    Restore,
    Stall,
    Sync,
    Synced,
    Ticked,
)
from shoal.elastic.view import Chain, Member, View, admit, drop, even_out, fill, lay_out, remove

_MAX_DEPARTED = 1024
"""How many of those that left are remembered by id; earlier ones are told by the view they hold."""
_MAX_RIVALS = 64

Phase = Literal["standing", "settling", "gathering", "running", "over"]
Step = tuple["State", list[Instruction]]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the run asked for."""

    servers: int
    """Servers to begin with, and shards."""
    backups: int = 1
    """Backups of each shard."""
    dead_seconds: float = 5.0
    """A member that was silent for longer is taken for dead."""
    join_seconds: float = 60.0
    """How long the servers and the first worker have to join."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What the center knows. Never changed in place."""

    wanted: Wanted
    phase: Phase = "standing"
    epoch: int = 0
    """The epoch that the center holds: of its election, or of the last view it published."""
    view: View | None = None
    """The last view: published, or in ``settling`` the newest that was reported."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """Those that are there, by id. In ``settling``: those that were heard so far."""
    heard: Mapping[str, float] = field(default_factory=dict)
    """When each of them was last heard."""
    veterans: frozenset[str] = frozenset()
    """In ``settling``: who was in a view. One that the newest view does not name was removed from it."""
    departed: Mapping[str, Refuse] = field(default_factory=dict)
    """What those that left are told when they come back."""
    rivals: Mapping[str, float] = field(default_factory=dict)
    """When those that want the name of another process first asked, by id. Forgotten when others count as heard that were not."""
    unfit: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Until when a server is not to be tried again as a backup of a shard that it failed to follow."""
    fallen: tuple[str, ...] = ()
    """Names of the servers that went since every shard last had all its copies."""
    began: float = 0.0
    """When the present phase began to wait."""
    now: float = 0.0
    """The latest time that any event told."""
    ticked: float = 0.0
    """When the last tick was."""


def step(state: State, event: Event) -> Step:
    """The center's next state, and what it must do, in this order. At most one ``Publish`` is among it."""
    if isinstance(event, Elected):
        return _elected(state, event)
    if state.phase == "standing":
        return state, []
    if not isinstance(event, Synced):
        state = replace(state, now=max(state.now, event.now))
    if state.phase == "over":
        return state, [_refuse_over(state, event.member.id)] if isinstance(event, Joined) else []
    handle: Callable[[State, Any], Step] = _HANDLERS[type(event)]
    return handle(state, event)


# ---- elections, and the views of the time before -----------------------------------------------------------------------------


def _elected(state: State, event: Elected) -> Step:
    fresh = State(
        wanted=state.wanted,
        phase="gathering" if event.kept is None and (event.fresh or event.epoch == 1) else "settling",
        epoch=event.epoch,
        view=event.kept,
        began=event.now,
        now=event.now,
        ticked=event.now,
    )
    instructions: list[Instruction] = []
    for report in event.reports:
        fresh, more = step(fresh, Joined(member=report.member, view=report.view, now=event.now))
        instructions += more
    return fresh, instructions


def _settle(state: State, instructions: list[Instruction]) -> Step:
    """Go on when everybody has reported whom the newest view names, or when it is too late for that."""
    view = state.view
    if view is None:
        is_late = state.now - state.began >= state.wanted.dead_seconds
        return _conclude(replace(state, phase="gathering"), instructions) if is_late else (state, instructions)
    # As long as nobody is heard it is more likely our own connection; that all are dead is only believed after a long time.
    is_late = (
        _latest(state) - state.began >= state.wanted.dead_seconds
        or state.now - state.began >= state.wanted.join_seconds
    )
    newcomers = {one.name: one for id, one in state.members.items() if id not in state.veterans}
    for old in view:
        new = newcomers.get(old.name)
        if new is None or new.id == old.id:
            continue
        # It joined before anybody told of this view.
        if _may_replace(new, old) and new.started >= old.started:
            state = _depart(state, old.id, _replaced(old, new))
        elif not _may_replace(new, old) and old.id in state.members:
            refusal = _taken(state, new, old)
            state, instructions = _depart(state, new.id, refusal), [*instructions, refusal]
    missing = [one.id for one in view if one.id not in state.members and one.id not in state.departed]
    if missing and not is_late:
        return state, instructions
    named = {one.id for one in view}
    for id in missing:
        state = _depart(
            state, id, _departed(id, f"it was silent for {state.wanted.dead_seconds:g} s after the election")
        )
    for id in sorted(state.veterans & state.members.keys() - named):
        refusal = _departed(id, "it was removed before this center was elected")
        state = _depart(state, id, refusal)
        instructions = [*instructions, refusal]
    heard = dict.fromkeys(state.members, state.now)
    state = replace(state, phase="running", veterans=frozenset(), heard=heard, rivals={})
    return _conclude(state, instructions, is_new_center=True)


# ---- coming, going, and signs of life ----------------------------------------------------------------------------------------


def _joined(state: State, event: Joined) -> Step:
    member, view = event.member, event.view
    if member.id in state.departed:
        return state, [state.departed[member.id]]
    if view is not None and view.epoch > state.epoch:
        # Somebody was elected after us; the elector will say so. Nothing that we decide can be published.
        return state, []
    if state.phase == "gathering" and state.view is None and view is not None:
        # A late sign of an earlier time: nothing may be laid out anew while the old weights are somewhere.
        state = replace(state, phase="settling", began=state.now)
    is_settling = state.phase == "settling"
    if member.id in state.members and not is_settling:
        state = _hear(state, member.id)
        return (state, []) if state.view is None else (state, [Remind(id=member.id, view=state.view)])
    was_named = view is not None and view.find(member.id) is not None
    if view is not None and was_named and not is_settling:
        refusal = _departed(
            member.id, f"the view of epoch {view.epoch} that it holds is over, and it was removed since"
        )
        return _depart(state, member.id, refusal), [refusal]
    instructions: list[Instruction] = []
    known = (*state.members.values(), *(state.view or ()))
    for other in {one.id: one for one in known if one.name == member.name and one.id != member.id}.values():
        if not _may_replace(member, other):
            if other.id in state.departed or (is_settling and was_named):
                continue  # That one is dead; or came after this one, and is turned away for it.
            return _contest(state, member, other)
        if member.started < other.started:
            refusal = _replaced(member, other)
            return _depart(state, member.id, refusal), [refusal]
        refusal = _replaced(other, member)
        state = _depart(state, other.id, refusal)
        instructions.append(refusal)
    state = _hear(replace(state, members={**state.members, member.id: member}), member.id)
    if is_settling:
        if was_named:
            state = replace(state, veterans=state.veterans | {member.id})
        if view is not None and (state.view is None or view.epoch > state.view.epoch):
            state = replace(state, view=view)
        return _settle(state, instructions)
    return _conclude(state, instructions)


def _may_replace(new: Member, old: Member) -> bool:
    """Whether a member is the process that another one was, or cannot be there beside it because it listens in its place."""
    return new.origin == old.origin or (new.address != "" and new.address == old.address)


def _contest(state: State, member: Member, other: Member) -> Step:
    """Two processes want one name: a sign of life since the second asked, that cannot have been on its way then, decides."""
    asked = state.rivals.get(member.id, state.now)
    if state.heard.get(other.id, asked) - asked > state.wanted.dead_seconds / 4:
        refusal = _taken(state, member, other)
        return _depart(state, member.id, refusal), [refusal]
    rivals = dict(list({**state.rivals, member.id: asked}.items())[-_MAX_RIVALS:])
    reason = f"{other.name!r} may be alive as {other.origin}, and is given {state.wanted.dead_seconds:g} s to be heard"
    return replace(state, rivals=rivals), [Stall(id=member.id, reason=reason)]


def _left(state: State, event: Left) -> Step:
    state = _depart(state, event.id, _departed(event.id, event.reason))
    return _settle(state, []) if state.phase == "settling" else _conclude(state, [])


def _heard(state: State, event: Heard) -> Step:
    if event.id in state.departed:
        return state, [state.departed[event.id]]
    if state.phase == "settling":
        newest, named = (0, None) if state.view is None else (state.view.epoch, state.view.find(event.id))
        if event.epoch > newest or (named is None and event.id not in state.members):
            return state, [Ask(id=event.id)]
        if named is not None:
            state = replace(state, members={**state.members, named.id: named}, veterans=state.veterans | {named.id})
        return _settle(_hear(state, event.id), [])
    if event.id not in state.members:
        return state, [Ask(id=event.id)]
    state = _hear(state, event.id)
    if state.view is None or event.epoch >= state.view.epoch or state.phase != "running":
        return state, []
    return state, [Remind(id=event.id, view=state.view)]


def _ticked(state: State, event: Ticked) -> Step:
    dead_seconds, join_seconds = state.wanted.dead_seconds, state.wanted.join_seconds
    gap, state = event.now - state.ticked, replace(state, ticked=event.now)
    if gap > dead_seconds / 2:
        # We did not run ourselves: their signs of life may still be on the way to us.
        state = replace(state, heard=dict.fromkeys(state.members, event.now), began=state.began + gap, rivals={})
    if state.phase == "settling":
        return _settle(state, [])
    latest = _latest(state)
    if state.phase == "running" and event.now - latest >= join_seconds:
        return _give_up(state, "none of the members was heard")
    silent = {id: latest - at for id, at in state.heard.items() if latest - at > dead_seconds}
    for id, seconds in silent.items():
        state = _depart(state, id, _departed(id, f"it was silent for {seconds:.1f} s, of {dead_seconds:g} s allowed"))
    return _conclude(state, [])


# ---- replicas ----------------------------------------------------------------------------------------------------------------


def _synced(state: State, event: Synced) -> Step:
    chain = _chain(state, event.shard)
    if chain is None or not any((one.server, one.order) == (event.server, event.order) for one in chain.joining):
        return state, []
    return _conclude(state, [], changed={event.shard: admit(chain, event.server)})


def _failed(state: State, event: Failed) -> Step:
    chain = _chain(state, event.shard)
    if chain is None or state.view is None or event.epoch != state.view.epoch or event.reporter != chain.primary:
        return state, []
    if event.server not in chain.replicas[1:]:
        return state, []
    until = event.now + state.wanted.dead_seconds
    state = replace(state, unfit={**state.unfit, (event.shard, event.server): until})
    return _conclude(state, [], changed={event.shard: remove(chain, event.server)})


def _chain(state: State, shard: int) -> Chain | None:
    if state.phase != "running" or state.view is None or not 0 <= shard < len(state.view.chains):
        return None
    return state.view.chains[shard]


# ---- the next view -----------------------------------------------------------------------------------------------------------


def _conclude(
    state: State,
    instructions: list[Instruction],
    *,
    changed: Mapping[int, Chain] = MappingProxyType({}),
    is_new_center: bool = False,
) -> Step:
    """Bring the view in line with who is there."""
    if state.phase == "gathering":
        return _gather(state, instructions)
    assert state.view is not None
    epoch, servers = state.epoch + 1, _ids(state, "server")
    chains = tuple(changed.get(shard, chain) for shard, chain in enumerate(state.view.chains))
    chains, lost = drop(chains, living=servers, epoch=epoch)
    if lost and not servers:
        return _gather(replace(state, phase="gathering", began=state.now), instructions)
    if lost:
        chains = lay_out(servers, shards=len(chains), backups=state.wanted.backups)
    unfit = {pair for pair, until in state.unfit.items() if until > state.now}
    chains = fill(chains, servers=servers, backups=state.wanted.backups, epoch=epoch, unfit=unfit)
    chains = even_out(chains)
    return _publish(state, instructions, chains, lost, is_new_center=is_new_center)


def _gather(state: State, instructions: list[Instruction]) -> Step:
    wanted, before = state.wanted, state.view
    servers, workers = _ids(state, "server"), _ids(state, "worker")
    is_late = state.now - state.began >= wanted.join_seconds
    # After the loss of every server fewer will do; a run does not begin with fewer than it asked for.
    least = 1 if before is not None and is_late else wanted.servers
    if len(servers) >= least and workers:
        chains = lay_out(servers, shards=wanted.servers, backups=wanted.backups)
        lost = tuple(range(wanted.servers)) if before is not None else ()
        return _publish(replace(state, phase="running"), instructions, chains, lost)
    if not is_late:
        return state, instructions
    counts = f"{len(servers)} of {wanted.servers} servers and {len(workers)} workers (at least 1) joined"
    state, more = _give_up(state, counts, fix="start the missing ones, or ask for fewer servers")
    return state, [*instructions, *more]


def _give_up(state: State, what: str, *, fix: str = "start the run again") -> Step:
    here = ", ".join(sorted(one.name for one in state.members.values())) or "nobody"
    reason = f"{what} within {state.wanted.join_seconds:g} s: {here}; {fix}"
    refusals = [Refuse(id=id, code="over", reason=reason) for id in state.members]
    return replace(state, phase="over"), [*refusals, GiveUp(reason=reason)]


def _publish(
    state: State,
    instructions: list[Instruction],
    chains: tuple[Chain, ...],
    lost: tuple[int, ...],
    *,
    is_new_center: bool = False,
) -> Step:
    before = state.view
    gone = [] if before is None else [one for one in before if one.id not in state.members]
    fallen = (*state.fallen, *(one.name for one in gone if one.role == "server"))
    view = View(
        epoch=state.epoch + 1,
        servers=tuple(state.members[id] for id in _ids(state, "server")),
        workers=tuple(state.members[id] for id in _ids(state, "worker")),
        chains=chains,
        history=0 if before is None else before.history + bool(lost),
        lost=fallen if lost else () if before is None else before.lost,
    )
    if before is not None and not is_new_center and replace(view, epoch=before.epoch) == before:
        return state, instructions
    instructions = [*instructions, Publish(view=view)]
    if lost:
        instructions.append(Restore(shards=lost, history=view.history))
    instructions += [Release(worker=one.id) for one in gone if one.role == "worker"]
    for shard, chain in enumerate(chains):
        instructions += [
            Sync(shard=shard, source=chain.primary, target=one.server, order=one.order)
            for one in chain.joining
            if is_new_center or one.order == view.epoch
        ]
    instructions += [Collect(kind=one.role, id=one.id) for one in gone]
    instructions += [] if before is None else _orphans(before.chains, chains, living=state.members)
    is_whole = bool(lost) or all(len(chain.backups) >= state.wanted.backups for chain in chains)
    return replace(state, view=view, epoch=view.epoch, fallen=() if is_whole else fallen), instructions


def _orphans(before: tuple[Chain, ...], after: tuple[Chain, ...], *, living: Collection[str]) -> list[Instruction]:
    return [
        Collect(kind="replica", id=server, shard=shard)
        for shard, (old, new) in enumerate(zip(before, after, strict=True))
        for server in old.replicas
        if server in living and server not in new.replicas
    ]


def _ids(state: State, role: str) -> list[str]:
    """Living members of a role: those of the view in its order, then the others by name."""
    named = [one.id for one in state.view or () if one.id in state.members]
    others = sorted(
        (one for one in state.members.values() if one.id not in named), key=lambda one: (len(one.name), one.name)
    )
    return [id for id in (*named, *(one.id for one in others)) if state.members[id].role == role]


# ---- who is there ------------------------------------------------------------------------------------------------------------


def _hear(state: State, id: str) -> State:
    heard = dict(state.heard)
    gap = state.now - _latest(state)
    if gap > state.wanted.dead_seconds / 2:
        # Nobody was heard for a while: that was our connection, and it counts against none of them.
        heard = {key: at + gap for key, at in heard.items()}
        state = replace(state, began=state.began + gap) if state.phase == "settling" else state
        state = replace(state, rivals={})
    return replace(state, heard={**heard, id: state.now})


def _latest(state: State) -> float:
    """When anybody was last heard. Others are silent only by comparison with this: it shows that signs do reach us."""
    return max(state.heard.values(), default=state.began)


def _depart(state: State, id: str, refusal: Refuse) -> State:
    departed = {**state.departed, id: refusal}
    for oldest in list(departed)[: max(0, len(departed) - _MAX_DEPARTED)]:
        del departed[oldest]
    return replace(
        state,
        members={key: one for key, one in state.members.items() if key != id},
        heard={key: at for key, at in state.heard.items() if key != id},
        unfit={pair: until for pair, until in state.unfit.items() if pair[1] != id},
        departed=departed,
    )


def _departed(id: str, reason: str) -> Refuse:
    return Refuse(id=id, code="departed", reason=f"{reason}; it may join again under a new id")


def _replaced(old: Member, new: Member) -> Refuse:
    reason = f"another process joined as {new.name!r} ({new.id} after {old.id}); every process needs a name of its own"
    return Refuse(id=old.id, code="replaced", reason=reason)


def _taken(state: State, new: Member, old: Member) -> Refuse:
    ago = state.now - state.heard.get(old.id, state.now)
    reason = (
        f"{new.name} is not let in: {old.origin or old.id} is {old.name} already, and was heard {ago:.1f} s ago; end that one "
        "first, or start this one as another (--index)"
    )
    return Refuse(id=new.id, code="taken", reason=reason)


def _refuse_over(state: State, id: str) -> Refuse:
    return Refuse(id=id, code="over", reason=f"the center of epoch {state.epoch} gave the run up")


_HANDLERS: Mapping[type, Callable[[State, Any], Step]] = {
    Joined: _joined,
    Left: _left,
    Heard: _heard,
    Ticked: _ticked,
    Synced: _synced,
    Failed: _failed,
}
