"""What the voters of a majority election say to each other, and what each of them must never forget."""

from dataclasses import dataclass

from shoal.comm.wire.operations import Body, Op, Operations


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
