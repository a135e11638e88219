"""Which replicas are present in an elastic run, and which logical replicas each of them computes: values only.

The plan's ``dp`` is the number of logical replicas, and it decides what is computed: which samples a logical replica has, and in
which order gradients are summed. How many replicas are present decides only who computes it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One copy of the model: one rank, or the tp, pp and cp ranks that make it up, which fail as one."""

    name: str
    """What people call it. A replica that is started in the place of another has a name of its own."""
    members: tuple[str, ...]
    """The ids of its processes, in the order of their positions in the replica. An id is of one start of one process."""
    host: str = ""
    """Where its first process runs."""


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """The membership under one epoch. Two views with the same epoch are the same view."""

    epoch: int
    replicas: tuple[Replica, ...]
    """Those that are present, in the order of their ranks along ``dp``."""
    num_logical: int
    """Logical replicas: what the step computes is the same for every number of present ones."""

    def __post_init__(self) -> None:
        assert 1 <= len(self.replicas) <= self.num_logical, (len(self.replicas), self.num_logical)

    @property
    def members(self) -> tuple[str, ...]:
        """Every process, replica by replica: the place of a process here is its rank."""
        return tuple(member for replica in self.replicas for member in replica.members)

    @property
    def num_rounds(self) -> int:
        """How many logical replicas the busiest of those present computes in a step."""
        return -(-self.num_logical // len(self.replicas))

    def logical_of(self, place: int) -> tuple[int, ...]:
        """The logical replicas that the present replica in this place computes, in the order of the rounds."""
        return deal(self.num_logical, len(self.replicas))[place]

    def to_json(self) -> str:
        """The view as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_view(text: str) -> GroupView:
    """The view that ``to_json`` wrote.

    Raises:
        ValueError: it is not such a view; says what is wrong with it.
    """
    found: Any = json.loads(text)
    try:
        replicas = tuple(
            Replica(name=_text(one["name"]), members=tuple(map(_text, one["members"])), host=_text(one["host"]))
            for one in found["replicas"]
        )
        epoch, num_logical = int(found["epoch"]), int(found["num_logical"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the view of a group: {error!r}") from error
    members = [member for one in replicas for member in one.members]
    if not 1 <= len(replicas) <= num_logical or len(set(members)) != len(members):
        raise ValueError(
            f"the view of epoch {epoch} has {len(replicas)} replicas for {num_logical} logical ones and the members {members}"
        )
    return GroupView(epoch=epoch, replicas=replicas, num_logical=num_logical)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def deal(num_logical: int, num_present: int) -> tuple[tuple[int, ...], ...]:
    """For each present replica the logical ones that it computes: replica p of n has p, p + n, p + 2n, ...

    So round k of a step is the logical replicas from kn to kn + n - 1, on the present ones in their order, and the sum over
    rounds is the sum over logical replicas from left to right.
    """
    assert 1 <= num_present <= num_logical, (num_logical, num_present)
    return tuple(tuple(range(place, num_logical, num_present)) for place in range(num_present))


def copy_holder(view: GroupView, place: int) -> int | None:
    """The place of the replica that keeps copies of what only the replica in this place holds; None when it is alone.

    The next one on another host, so that a host's death loses nothing; the next one where all are on one host.
    """
    return holder_of([one.host for one in view.replicas], place) if len(view.replicas) > 1 else None


def holder_of(hosts: Sequence[str], place: int) -> int:
    """The same, given the host of each of several replicas."""
    number = len(hosts)
    others = [(place + away) % number for away in range(1, number)]
    elsewhere = [other for other in others if hosts[other] != hosts[place]]
    return next(iter(elsewhere or others))
