"""The election among machines: a majority of a fixed list of voters, each with one vote per term. Pure: no clock, socket or disk.

This is the election half of Raft (Ongaro and Ousterhout 2014, section 5.2; the trial poll is section 9.6 of Ongaro's thesis) with
leases. The term is the epoch. A vote and the answer to a renewal both grant a lease: until it has run out on the voter's clock,
the voter gives its vote to nobody else. The leader counts the same lease from when it *sent* the question that a majority
answered, so its lease ends first, as long as no two clocks differ in rate by more than ``drift``. A voter that starts again has
its ballot but not its promises, so it first keeps still for as long as a promise could hold.

What must happen outside: if the ballot changed, it is on disk before any of the messages goes out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal.comm.wire.operations import Body, Op, Operations
from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """A voter's word, on disk before anybody hears it: it votes once in a term, and never again in an earlier one."""

    term: int = 0
    vote: str = ""
    """The candidate that has its vote in this term; empty while nobody has."""


class Poll(Body, frozen=True):
    """A candidate asks for a vote. ``sent`` is its own clock, and comes back with the answer."""

    term: int
    candidate: str
    address: str
    is_trial: bool
    """True: would you? Nobody's term changes by that, so one that was cut off does not disturb the others when it comes back."""
    sent: float


class Polled(Body, frozen=True):
    """The answer to a poll."""

    voter: str
    is_granted: bool
    asked: int
    """The term of the poll."""
    term: int
    """The voter's own, by which a candidate that is behind catches up."""
    is_trial: bool
    sent: float


class Renew(Body, frozen=True):
    """A leader extends its lease."""

    term: int
    leader: str
    address: str
    sent: float


class Renewed(Body, frozen=True):
    """The answer to a renewal."""

    voter: str
    is_granted: bool
    asked: int
    term: int
    sent: float


class Resigned(Body, frozen=True):
    """A leader gave up its lease of this term, so nobody has to wait for it to run out."""

    term: int
    leader: str


class Noted(Body, frozen=True):
    """The answer to a resignation."""


class Seek(Body, frozen=True):
    """A member asks who leads."""


class Found(Body, frozen=True):
    """The answer: itself, if it leads; epoch 0 otherwise. What it may know of others could be over."""

    epoch: int
    name: str
    address: str


Message = Poll | Polled | Renew | Renewed | Resigned

OPERATIONS = Operations(
    {
        "poll": Op(Poll, Polled, max_payload=0, max_body=1024, fenced=False),
        "renew": Op(Renew, Renewed, max_payload=0, max_body=1024, fenced=False),
        "resigned": Op(Resigned, Noted, max_payload=0, max_body=1024, fenced=False),
        "seek": Op(Seek, Found, max_payload=0, max_body=1024, fenced=False),
    }
)
"""Terms are the fence here: every message carries its own."""


Role = Literal["voter", "trying", "polling", "leader"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all voters must agree on."""

    voters: tuple[str, ...]
    lease_seconds: float = 2.0
    drift: float = 0.02
    """The most by which two clocks may differ in rate."""
    seed: int = 0

    @property
    def quorum(self) -> int:
        """Votes that are more than half."""
        return len(self.voters) // 2 + 1

    @property
    def promise_seconds(self) -> float:
        """How long a voter keeps to what it granted, on its own clock."""
        return self.lease_seconds * (1 + self.drift)

    def check(self) -> None:
        """Raise if no election can be held.

        Raises:
            RequestError: fewer than three voters, or one named twice.
        """
        if len(set(self.voters)) != len(self.voters) or len(self.voters) < 3:
            raise RequestError(
                f"a majority needs at least 3 voters with different names, and there are {len(self.voters)}: "
                f"{', '.join(self.voters)}; on one machine elect by a folder instead"
            )


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A lease that this voter granted."""

    holder: str
    address: str
    term: int
    until: float


@dataclass(frozen=True, kw_only=True)
class State:
    """One voter, who may be a candidate."""

    name: str
    address: str
    terms: Terms
    ballot: Ballot = field(default_factory=Ballot)
    is_standing: bool = False
    """True when it wants to lead."""
    role: Role = "voter"
    epoch: int = 0
    """The term that it leads, or last led."""
    is_advancing: bool = False
    """True while a leader asks for the votes of the next term; its lease of this term goes on meanwhile."""
    granted: frozenset[str] = frozenset()
    """Who has said yes to the present poll."""
    answered: Mapping[str, float] = field(default_factory=dict)
    """The leader's own time of the last question that each voter said yes to."""
    lease_until: float = float("-inf")
    promise: Promise | None = None
    still_until: float = float("-inf")
    """Before this a voter that started again grants nothing, because it may have promised something."""
    act_at: float = 0.0
    """When a candidate tries next."""
    num_draws: int = 0

    def is_valid(self, now: float) -> bool:
        """True while it leads and its lease holds."""
        return self.role == "leader" and now < self.lease_until

    @property
    def others(self) -> tuple[str, ...]:
        """The other voters."""
        return tuple(name for name in self.terms.voters if name != self.name)


Envelope = tuple[str, Message]
"""To whom, and what."""
Step = tuple[State, list[Envelope]]


def begin(name: str, *, address: str, terms: Terms, ballot: Ballot, now: float) -> State:
    """A voter that starts, or starts again."""
    assert name in terms.voters
    still_until = now + terms.promise_seconds if ballot.term else float("-inf")
    state = State(name=name, address=address, terms=terms, ballot=ballot, still_until=still_until)
    return _draw(state, max(now, still_until))


def stand(state: State) -> State:
    """It wants to lead, from the next ``tick`` on."""
    return replace(state, is_standing=True)


def tick(state: State, now: float) -> Step:
    """Time went on: a lease may be over, or a candidate's turn has come."""
    if state.role == "leader":
        return (state, []) if now < state.lease_until else (demote(state, now), [])
    if not state.is_standing or now < state.act_at or _is_bound(state, state.name, now):
        return (state, []) if state.is_standing else (replace(state, role="voter"), [])
    state = _draw(replace(state, role="trying", granted=frozenset({state.name})), now)
    return state, _ask(state, state.ballot.term + 1, is_trial=True, now=now)


def extend(state: State, now: float) -> Step:
    """A leader renews its lease. While it advances it asks for the votes again instead, which extend the lease as well."""
    if not state.is_valid(now):
        return demote(state, now), []
    state = _count_own(state, now)
    if state.is_advancing:
        return state, _ask(state, state.ballot.term, is_trial=False, now=now)
    renew = Renew(state.epoch, state.name, state.address, now)
    return state, [(name, renew) for name in state.others]


def advance(state: State, now: float) -> Step:
    """A leader asks for the votes of the next term."""
    if not state.is_valid(now):
        return demote(state, now), []
    if state.is_advancing:
        return extend(state, now)
    ballot = Ballot(term=state.ballot.term + 1, vote=state.name)
    state = _count_own(replace(state, ballot=ballot, is_advancing=True, granted=frozenset({state.name})), now)
    return state, _ask(state, ballot.term, is_trial=False, now=now)


def resign(state: State, now: float) -> Step:
    """Stop leading, and stop wanting to."""
    was_leader = state.role == "leader"
    promise = None if was_leader else state.promise
    state = replace(demote(state, now), role="voter", is_standing=False, promise=promise)
    # Of its newest term: while it advances, some have granted it that one already.
    resigned = Resigned(state.ballot.term, state.name)
    return state, [(name, resigned) for name in state.others] if was_leader else []


def demote(state: State, now: float) -> State:
    """Lead no longer; a candidate that still stands tries again after a random time."""
    if state.role != "leader":
        return state
    return _draw(
        replace(state, role="voter", is_advancing=False, lease_until=float("-inf"), answered={}, granted=frozenset()),
        now,
    )


def receive(state: State, message: Message, now: float) -> Step:
    """A message of another voter; the answer, if it is a question, is among what goes out."""
    handle: Callable[[State, Any, float], Step] = _HANDLERS[type(message)]
    return handle(state, message, now)


# ---- as a voter --------------------------------------------------------------------------------------------------------------


def _poll(state: State, poll: Poll, now: float) -> Step:
    ballot = state.ballot
    is_free = poll.term > ballot.term or (
        not poll.is_trial and poll.term == ballot.term and ballot.vote in ("", poll.candidate)
    )
    is_granted = is_free and not _is_bound(state, poll.candidate, now)
    if is_granted and not poll.is_trial:
        state = _promise(state, poll.candidate, poll.address, poll.term, now)
        state = replace(state, ballot=Ballot(term=poll.term, vote=poll.candidate))
    answer = Polled(state.name, is_granted, poll.term, state.ballot.term, poll.is_trial, poll.sent)
    return state, [(poll.candidate, answer)]


def _renew(state: State, renew: Renew, now: float) -> Step:
    # A leader that renews was elected by a majority whose promises to others were over, so ours to another is worth nothing now.
    is_granted = renew.term >= state.ballot.term
    if is_granted:
        state = _promise(state, renew.leader, renew.address, renew.term, now)
        if renew.term > state.ballot.term:
            state = replace(state, ballot=Ballot(term=renew.term, vote=renew.leader))
    return state, [(renew.leader, Renewed(state.name, is_granted, renew.term, state.ballot.term, renew.sent))]


def _resigned(state: State, resigned: Resigned, now: float) -> Step:
    promise = state.promise
    if promise is not None and promise.holder == resigned.leader and promise.term <= resigned.term:
        state = _draw(replace(state, promise=None), now)
    return state, []


def _is_bound(state: State, candidate: str, now: float) -> bool:
    """True when a promise keeps this voter from voting for the candidate."""
    if now < state.still_until:
        return True
    return state.promise is not None and state.promise.holder != candidate and now < state.promise.until


def _promise(state: State, holder: str, address: str, term: int, now: float) -> State:
    until = now + state.terms.promise_seconds
    promise = Promise(holder=holder, address=address, term=term, until=until)
    state = replace(demote(state, now), role="voter", promise=promise)
    return _draw(state, until)


# ---- as a candidate ----------------------------------------------------------------------------------------------------------


def _polled(state: State, answer: Polled, now: float) -> Step:
    if not answer.is_granted:
        return _catch_up(state, answer.term, now), []
    if answer.is_trial:
        if state.role != "trying" or answer.asked != state.ballot.term + 1:
            return state, []
        state = replace(state, granted=state.granted | {answer.voter})
        return (state, []) if len(state.granted) < state.terms.quorum else _poll_all(state, now)
    is_asking = state.role == "polling" or (state.role == "leader" and state.is_advancing)
    if not is_asking or answer.asked != state.ballot.term:
        return state, []
    state = replace(_count(state, answer.voter, answer.sent), granted=state.granted | {answer.voter})
    if len(state.granted) < state.terms.quorum:
        return state, []
    return replace(state, role="leader", epoch=state.ballot.term, is_advancing=False), []


def _poll_all(state: State, now: float) -> Step:
    ballot = Ballot(term=state.ballot.term + 1, vote=state.name)
    state = replace(state, role="polling", ballot=ballot, granted=frozenset({state.name}), answered={})
    state = _count_own(_draw(state, now), now)
    return state, _ask(state, ballot.term, is_trial=False, now=now)


def _renewed(state: State, answer: Renewed, now: float) -> Step:
    if not answer.is_granted or state.role != "leader" or answer.asked != state.epoch:
        return state, []
    return _count(state, answer.voter, answer.sent), []


def _catch_up(state: State, term: int, now: float) -> State:
    # A leader goes on with the majority that it has; if it has none, its lease runs out.
    if term <= state.ballot.term or state.role == "leader":
        return state
    return _draw(replace(state, role="voter", ballot=Ballot(term=term)), now)


def _ask(state: State, term: int, *, is_trial: bool, now: float) -> list[Envelope]:
    poll = Poll(term, state.name, state.address, is_trial, now)
    return [(name, poll) for name in state.others]


def _count_own(state: State, now: float) -> State:
    """A candidate is bound by its own question, as every other voter will be."""
    until = now + state.terms.promise_seconds
    promise = Promise(holder=state.name, address=state.address, term=state.ballot.term, until=until)
    return replace(_count(state, state.name, now), promise=promise)


def _count(state: State, voter: str, sent: float) -> State:
    """The lease lasts from the latest question that a majority has said yes to."""
    answered = {**state.answered, voter: max(sent, state.answered.get(voter, sent))}
    state = replace(state, answered=answered)
    if len(answered) < state.terms.quorum:
        return state
    since = sorted(answered.values(), reverse=True)[state.terms.quorum - 1]
    return replace(state, lease_until=since + state.terms.lease_seconds)


def _draw(state: State, after: float) -> State:
    """Set the candidate's next turn: random, so that two of them do not split the votes again and again."""
    drawn = derive_key("election", state.terms.seed, state.name, state.num_draws) / 2**64
    act_at = after + (0.05 + 0.45 * drawn) * state.terms.lease_seconds
    return replace(state, act_at=act_at, num_draws=state.num_draws + 1)


_HANDLERS: Mapping[type, Callable[[State, Any, float], Step]] = {
    Poll: _poll,
    Polled: _polled,
    Renew: _renew,
    Renewed: _renewed,
    Resigned: _resigned,
}
