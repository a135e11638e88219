"""Who takes part in an elastic run of synchronous replicas: an event goes in, a new state and instructions come out.

One process decides (on one host the supervisor, on several the coordinator) and publishes a ``GroupView`` under a new epoch
for every change. No clock, no socket, no randomness here.

    gathering  there is no view, or fewer than ``min_dp`` replicas are left: waiting for more
    running    there is a view
    over       the run ended, or was given up

A rank is in at most one view: it leaves the groups of the old epoch before it joins those of a newer one, and a collective
ends only if all members of its view take part. So two views that share a member cannot both go on, nor can one that has a dead
member. A view that shares none with one before waits until one of those is known to have ended: its end was seen, or the
lease of its host is over (``lease.py``): a host that the coordinator does not answer stops before that. Not only with the last
one: after {b, c} and {a, c}, which c may never have come to, {a} shares one with the last, and b and c may still take steps. A
member that was left out is never let in again: it has to come as another process, with nothing in its hands.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.elastic.groupchanges import (
    Died,
    Ended,
    Event,
    Expel,
    Failed,
    GiveUp,
    Heard,
    HeardAgain,
    Instruction,
    Joined,
    Left,
    Order,
    Publish,
    Ready,
    Remind,
    Slow,
    Ticked,
)
from shoal.elastic.groupstate import Host, State, Trouble, Unit
from shoal.elastic.groupview import GroupView, Replica

_MAX_DEPARTED = 65536
"""How many members that left are remembered by id."""

Step = tuple[State, list[Instruction]]


def step(state: State, event: Event) -> Step:
    """The next state, and what must be done, in this order. At most one ``Publish`` is among it."""
    state = replace(state, now=max(state.now, event.now))
    if state.began is None:
        state = replace(state, began=state.now)
    if state.phase == "over":
        if isinstance(event, Joined):
            return state, [Expel(member=event.member, host=event.host, reason="the run is over")]
        return state, []
    handle: Callable[[State, Any], Step] = _HANDLERS[type(event)]
    return handle(state, event)


# ---- coming and going ----------------------------------------------------------------------------------------------------------


def _joined(state: State, event: Joined) -> Step:
    known = state.hosts.get(event.host, Host(heard=state.now))
    refusal = state.departed.get(event.member)
    if known.is_out:
        refusal = f"host {event.host} failed {len(known.failures)} times and was left out"
    unit = state.units.get(event.replica) or Unit(name=event.replica, spare=event.spare, members={}, hosts={})
    other = unit.members.get(event.position, event.member)
    if event.replica in state.broken:
        refusal = f"another process of {event.replica} ended before all had come"
    if other != event.member:
        refusal = f"{event.replica} has {other} in position {event.position} already"
    if refusal is not None:
        return state, [Expel(member=event.member, host=event.host, reason=refusal)]
    unit = replace(
        unit,
        members={**unit.members, event.position: event.member},
        hosts={**unit.hosts, event.member: event.host},
    )
    units, hosts = {**state.units, unit.name: unit}, {**state.hosts, event.host: known}
    return _conclude(replace(state, units=units, hosts=hosts))


def _ready(state: State, event: Ready) -> Step:
    unit = _unit_of(state, event.member)
    if unit is None:
        return state, []
    unit = replace(unit, ready=unit.ready | {event.member})
    is_ready = unit.is_ready(state.wanted.replica_size)
    ordered = {name: order for name, order in state.ordered.items() if not is_ready or name != unit.name}
    return _conclude(replace(state, units={**state.units, unit.name: unit}, ordered=ordered))


def _died(state: State, event: Died) -> Step:
    return _lose(state, event.member, event.cause, replica=event.replica, is_failure=True)


def _left(state: State, event: Left) -> Step:
    state, instructions = _lose(
        state, event.member, event.reason, replica=event.replica, is_failure=False, is_gone=False
    )
    if any(isinstance(one, Publish) for one in instructions):
        # It ends by itself at the end of the step, when it sees the view without it.
        instructions = [one for one in instructions if not (isinstance(one, Expel) and one.member == event.member)]
    return state, instructions


def _slow(state: State, event: Slow) -> Step:
    unit = _unit_of(state, event.member)
    if not state.wanted.drops_slow or state.view is None or unit is None or not _is_present(state, unit):
        return state, []
    if len(state.view.replicas) + len(_candidates(state)) <= state.wanted.min_dp:
        return state, []
    return _lose(state, event.member, f"slow: {event.reason}", is_failure=True, is_gone=False)


def _lose(state: State, member: str, cause: str, *, is_failure: bool, replica: str = "", is_gone: bool = True) -> Step:
    """A process is gone or has to go, and its replica with it."""
    unit = _unit_of(state, member)
    if unit is None:
        if member in state.departed:
            return _conclude(_end(state, member=member)) if is_gone else (state, [])
        # It died before it joined: it must not come in later, and what it was ordered for is ordered again.
        host = state.ordered[replica][0] if replica in state.ordered else ""
        lost = [state.units[replica]] if replica in state.units else []
        state, instructions = _drop(state, lost, f"{member}: {cause}")
        state = _cancel(replace(state, departed=_remember(state, {member: cause})), {replica} & state.ordered.keys())
    else:
        gone, host = frozenset({member} if is_gone else ()), unit.hosts[member]
        state, instructions = _drop(state, [unit], f"{member} on {host}: {cause}", gone=gone)
    if is_failure:
        state, more = _blame(state, host)
        instructions += more
    return _conclude(state, instructions)


def _heard(state: State, event: Heard) -> Step:
    state = _with_their_time(state)
    before = state.hosts.get(event.host)
    known = before or Host(heard=state.now)
    if event.agent in known.former:
        return state, []
    instructions: list[Instruction] = []
    if event.agent != known.agent:
        if known.agent:
            lost = _units_on(state, event.host)
            state, instructions = _drop(state, lost, f"the agent of host {event.host} ended, and another was started")
            state = _end(state, host=event.host)
        state = _cancel(state, _orders_on(state, event.host))
        known = replace(known, agent=event.agent, former=known.former | {known.agent} - {""})
    slots = known.slots if event.slots is None else event.slots
    known = replace(known, heard=state.now, slots=slots, is_silent=False)
    state = replace(state, hosts={**state.hosts, event.host: known})
    instructions += [
        Expel(member=member, host=event.host, reason=state.departed[member])
        for member in event.members
        if member in state.departed
    ]
    if state.view is not None and event.epoch is not None and event.epoch < state.epoch:
        instructions.append(Remind(host=event.host, view=state.view))
    instructions += [
        Order(replica=name, host=host, spare=spare)
        for name, (host, spare, _) in state.ordered.items()
        if host == event.host and event.replicas is not None and name not in event.replicas
    ]
    is_news = before is None or before.slots != slots or before.is_silent or before.agent != known.agent
    return _conclude(state, instructions) if is_news else (state, instructions)


def _with_their_time(state: State) -> State:
    """When nobody was heard for long it was our own connection: the others have their time again."""
    if state.now - _latest(state) <= state.wanted.lease_seconds / 2:
        return state
    return replace(state, hosts={name: replace(host, heard=state.now) for name, host in state.hosts.items()})


def _heard_again(state: State, event: HeardAgain) -> Step:
    """As so many ``Heard``, with one copy of the table of hosts."""
    same = {
        name: replace(known, heard=state.now)
        for name, agent in event.agents.items()
        if (known := state.hosts.get(name)) is not None and known.agent == agent and not known.is_silent
    }
    state, instructions = _with_their_time(state), list[Instruction]()
    state = replace(state, hosts={**state.hosts, **same})
    for name, agent in event.agents.items():
        if name not in same:
            state, more = _heard(state, Heard(host=name, agent=agent, now=event.now))
            instructions += more
    return state, instructions


def _ended(state: State, event: Ended) -> Step:
    return replace(state, phase="over"), []


# ---- silence, and what fails while nobody dies -------------------------------------------------------------------------------


def _ticked(state: State, event: Ticked) -> Step:
    wanted = state.wanted
    gap = event.now - (event.now if state.ticked is None else state.ticked)
    state = replace(state, ticked=event.now)
    if gap > wanted.lease_seconds / 2:
        # We did not run ourselves: their signs of life may still be on the way to us.
        state = replace(state, hosts={name: replace(host, heard=event.now) for name, host in state.hosts.items()})
    instructions: list[Instruction] = []
    units, hosts = state.units, state.hosts
    latest = _latest(state)
    if state.phase == "running" and event.now - latest > max(wanted.lease_seconds, wanted.join_seconds):
        return _give_up(state, [], f"none of the hosts was heard for {event.now - latest:.0f} s; start the run again")
    # Counted to when anybody was heard last: if all are silent it is our own connection, and they have stopped by themselves.
    silent = {name: latest - host.heard for name, host in state.hosts.items() if not host.is_silent}
    for name in [name for name, seconds in silent.items() if seconds > wanted.lease_seconds]:
        lost = _units_on(state, name)
        cause = f"host {name} was silent for {silent[name]:.1f} s, of {wanted.lease_seconds:g} s allowed"
        state, more = _drop(state, lost, cause)
        state = _end(state, host=name)
        instructions += more
        silenced = {**state.hosts, name: replace(state.hosts[name], is_silent=True)}
        state = _cancel(replace(state, hosts=silenced), _orders_on(state, name))
    for name, (host, _, since) in dict(state.ordered).items():
        if event.now - since > wanted.join_seconds:
            lost = [state.units[name]] if name in state.units else []
            state, more = _drop(state, lost, f"{name} did not join within {wanted.join_seconds:g} s")
            instructions += more
            state = _cancel(state, {name} & state.ordered.keys())
            state, more = _blame(state, host)
            instructions += more
    if state.trouble is not None and event.now - state.trouble.since >= wanted.settle_seconds:
        return _retry(state, instructions)
    if state.phase == "running" and state.units is units and state.hosts is hosts:
        # Time alone changes nothing else while there is a view: what there is to conclude was concluded when it was told.
        return state, instructions
    return _conclude(state, instructions)


def _failed(state: State, event: Failed) -> Step:
    unit = _unit_of(state, event.member)
    if unit is None or event.epoch != state.epoch or state.phase != "running" or not _is_present(state, unit):
        return state, []
    reporter = unit.hosts[event.member]
    trouble = state.trouble or Trouble(since=event.now)
    pairs = {(reporter, suspect) for suspect in event.suspects if suspect in state.hosts}
    return replace(state, trouble=replace(trouble, suspected=trouble.suspected | pairs)), []


def _retry(state: State, instructions: list[Instruction]) -> Step:
    """Nobody died: the same replicas go on under a new epoch, and the host that most of them could not reach is blamed."""
    assert state.trouble is not None and state.view is not None
    votes = Counter(suspect for by, suspect in state.trouble.suspected if by != suspect)
    load = Counter(one.host for one in state.view.replicas)
    state = replace(state, trouble=None, num_retries=state.num_retries + 1, cause="a collective failed and nobody died")
    if votes:
        blamed = max(votes, key=lambda host: (votes[host], -load[host], host))
        state = replace(state, cause=f"a collective failed, nobody died, and host {blamed} was not reached")
        state, more = _blame(state, blamed)
        return _conclude(state, instructions + more, is_retry=True)
    faults = _recent(state, (*state.faults, state.now))
    state = replace(state, faults=faults)
    if len(faults) > state.wanted.max_failures:
        reason = (
            f"{len(faults)} collectives failed within {state.wanted.failure_window:g} s, nobody died, and no host is to blame; "
            "look for the first error in the logs of the ranks, or raise elastic.max_failures"
        )
        return _give_up(state, instructions, reason)
    return _conclude(state, instructions, is_retry=True)


def _latest(state: State) -> float:
    """When any host was heard last, of those whose lease is not over."""
    return max((host.heard for host in state.hosts.values() if not host.is_silent), default=state.now)


def _blame(state: State, name: str) -> Step:
    """Count a failure of a host, and leave it out when there were too many."""
    host = state.hosts.get(name)
    if host is None:
        return state, []
    failures = _recent(state, (*host.failures, state.now))
    is_out = host.is_out or len(failures) > state.wanted.max_failures
    state = replace(state, hosts={**state.hosts, name: replace(host, failures=failures, is_out=is_out)})
    if not is_out:
        return state, []
    lost = _units_on(state, name)
    state = _cancel(state, _orders_on(state, name) - {unit.name for unit in lost})
    return _drop(state, lost, f"host {name} failed {len(failures)} times and is left out")


def _recent(state: State, times: Sequence[float]) -> tuple[float, ...]:
    return tuple(time for time in times if state.now - time <= state.wanted.failure_window)


# ---- the next view -------------------------------------------------------------------------------------------------------------


def _conclude(state: State, instructions: Sequence[Instruction] = (), *, is_retry: bool = False) -> Step:
    """Bring the view in line with who is there, and order what is missing."""
    wanted, done = state.wanted, list(instructions)
    names = _next_replicas(state)
    is_first = state.view is None
    is_late = state.began is not None and state.now - state.began >= wanted.join_seconds
    enough = wanted.at_start if is_first and not is_late else wanted.min_dp
    if len(names) < enough:
        if state.phase == "running":
            state = replace(state, phase="gathering", began=state.now, trouble=None)
        elif is_late:
            there = ", ".join(sorted(names)) or "none"
            reason = (
                f"{len(names)} of at least {wanted.min_dp} replicas were there within {wanted.join_seconds:g} s ({there}); "
                "start hosts again, or lower elastic.min_dp"
            )
            return _give_up(state, done, f"{reason}; last: {state.cause}" if state.cause else reason)
        return _order(state, done)
    replicas = tuple(state.units[name].replica for name in names)
    is_same = state.view is not None and state.view.replicas == replicas and state.phase == "running"
    if is_same and not is_retry:
        return _order(state, done)
    if _may_go_on(state, replicas):
        return _order(state, done)
    num_logical = len(replicas) if wanted.scales else wanted.num_logical
    view = GroupView(epoch=state.epoch + 1, replicas=replicas, num_logical=num_logical)
    cause = state.cause or ("the run begins" if is_first else "replicas came")
    earlier = _gone_on_with(state)
    state = replace(state, phase="running", epoch=view.epoch, view=view, earlier=earlier, trouble=None, cause="")
    done.append(Publish(view=view, cause=cause, is_retry=is_same))
    return _order(state, done)


def _next_replicas(state: State) -> list[str]:
    """The names of the next view: those who stay keep their order, one that waits takes the place of one that is gone."""
    waiting = [unit.name for unit in _candidates(state)]
    places: list[str] = []
    for old in () if state.view is None else state.view.replicas:
        unit = state.units.get(old.name)
        if unit is not None and unit.replica.members == old.members:
            places.append(old.name)
        elif waiting:
            places.append(waiting.pop(0))
    return (places + waiting)[: state.wanted.limit]


def _candidates(state: State) -> list[Unit]:
    """The replicas that could be taken in now: those that were meant to take part first, then spares."""
    size = state.wanted.replica_size
    found = [unit for unit in _absent(state) if unit.is_ready(size)]
    return sorted(found, key=lambda unit: (unit.spare, _number(unit.name)))


def _absent(state: State) -> list[Unit]:
    """The replicas that are not in the view."""
    present = {one.members for one in state.view.replicas} if state.view is not None else set()
    return [unit for unit in state.units.values() if unit.replica.members not in present]


def _order(state: State, instructions: list[Instruction]) -> Step:
    """Order the replicas that are missing, each on the host with the fewest."""
    wanted, coming = state.wanted, len(state.ordered.keys() - state.units.keys())
    if state.view is None:
        # Those to begin with are started by whoever starts the run; only one that died on the way is ordered.
        missing = [False] * (state.num_lost - state.num_ordered)
    else:
        absent = _absent(state)
        num_active = len(state.units) - len(absent)
        num_active += sum(not unit.spare for unit in absent) + sum(
            not spare for name, (_, spare, _) in state.ordered.items() if name not in state.units
        )
        total = wanted.limit + wanted.spares - len(state.units) - coming
        missing = [place >= wanted.limit - num_active for place in range(total)]
    load = Counter(host for unit in state.units.values() for host in set(unit.hosts.values()))
    load.update(host for name, (host, _, _) in state.ordered.items() if name not in state.units)
    for spare in missing:
        open_ = [
            name
            for name, host in state.hosts.items()
            if not host.is_out and not host.is_silent and load[name] < host.slots
        ]
        if not open_:
            break
        host = min(open_, key=lambda name: (load[name], name))
        load[host] += 1
        name = f"replica-{wanted.num_logical + state.num_ordered}"
        ordered = {**state.ordered, name: (host, spare, state.now)}
        state = replace(state, ordered=ordered, num_ordered=state.num_ordered + 1)
        instructions.append(Order(replica=name, host=host, spare=spare))
    return state, instructions


def _drop(state: State, units: Sequence[Unit], cause: str, *, gone: frozenset[str] = frozenset()) -> Step:
    """Take replicas out, and end those of their processes that may still run."""
    instructions: list[Instruction] = []
    left, ordered = dict(state.units), dict(state.ordered)
    was_present = any(_is_present(state, unit) for unit in units)
    for unit in units:
        del left[unit.name]
        ordered.pop(unit.name, None)
        instructions += [
            Expel(member=member, host=unit.hosts[member], reason=cause)
            for member in unit.members.values()
            if member not in gone
        ]
    departed = _remember(state, {member: cause for unit in units for member in unit.members.values()})
    causes = "; ".join(one for one in (state.cause, cause) if one) if was_present else state.cause
    alive = {member: unit.hosts[member] for unit in units for member in unit.members.values() if member not in gone}
    broken = state.broken | {unit.name for unit in units if unit.name in state.ordered}
    named = {member for members in _views(state) for member in members}
    lingering = {member: host for member, host in {**state.lingering, **alive}.items() if member in named}
    state = replace(
        state, units=left, ordered=ordered, departed=departed, lingering=lingering, cause=causes, broken=broken
    )
    return replace(state, num_lost=state.num_lost + len(units)), instructions


def _end(state: State, *, member: str = "", host: str = "") -> State:
    """A member that was left out has ended, or all of them on a host have, or cannot take a step any more."""
    left = {one: where for one, where in state.lingering.items() if one != member and where != host}
    return replace(state, lingering=left)


def _may_go_on(state: State, replicas: Sequence[Replica]) -> bool:
    """Whether all of a view before could still take steps when the next one begins: they share none, and none has ended."""
    new = {member for one in replicas for member in one.members}
    return any(all(member not in new and member in state.lingering for member in members) for members in _views(state))


def _views(state: State) -> list[tuple[str, ...]]:
    """The members of every view that may still be gone on with."""
    return [*state.earlier, *([] if state.view is None else [state.view.members])]


def _gone_on_with(state: State) -> tuple[tuple[str, ...], ...]:
    """Those of them of which nobody has ended. Whoever shares a member with one shares it with all that have more."""
    alive = {member for unit in state.units.values() for member in unit.hosts} | state.lingering.keys()
    found: list[tuple[str, ...]] = []
    for members in sorted(_views(state), key=len):
        if alive.issuperset(members) and not any(set(members).issuperset(other) for other in found):
            found.append(members)
    return tuple(found)


def _orders_on(state: State, host: str) -> set[str]:
    return {name for name, (where, _, _) in state.ordered.items() if where == host}


def _cancel(state: State, names: Collection[str]) -> State:
    """Nobody waits for these any more; what of them comes later has to end."""
    ordered = {name: order for name, order in state.ordered.items() if name not in names}
    num_lost = state.num_lost + sum(name not in state.units for name in names)
    return replace(state, ordered=ordered, num_lost=num_lost, broken=state.broken | set(names))


def _remember(state: State, departed: Mapping[str, str]) -> dict[str, str]:
    found = {**state.departed, **departed}
    return found if len(found) <= _MAX_DEPARTED else dict(list(found.items())[-_MAX_DEPARTED:])


def _give_up(state: State, instructions: list[Instruction], reason: str) -> Step:
    return replace(state, phase="over"), [*instructions, GiveUp(reason=reason)]


def _units_on(state: State, host: str) -> list[Unit]:
    return [unit for unit in state.units.values() if host in unit.hosts.values()]


def _unit_of(state: State, member: str) -> Unit | None:
    return next((unit for unit in state.units.values() if member in unit.hosts), None)


def _is_present(state: State, unit: Unit) -> bool:
    return state.view is not None and any(one.members == unit.replica.members for one in state.view.replicas)


def _number(name: str) -> tuple[int, str]:
    """In the order of numbers: replica-2 is before replica-10."""
    digits = name.rpartition("-")[2]
    return (int(digits), name) if digits.isdigit() else (0, name)


_HANDLERS: Mapping[type, Callable[[State, Any], Step]] = {
    Joined: _joined,
    Ready: _ready,
    Died: _died,
    Left: _left,
    Slow: _slow,
    Heard: _heard,
    HeardAgain: _heard_again,
    Failed: _failed,
    Ended: _ended,
    Ticked: _ticked,
}
