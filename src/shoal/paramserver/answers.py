"""What the book answers to each input, as values: the server sends them on, and acts on what changed."""

from dataclasses import dataclass

from shoal.paramserver.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an input changed for others. True in a condition when waiting takes must be decided again."""

    closed: tuple[Round, ...] = ()
    freed: tuple[int, ...] = ()
    """Portions that are todo again."""
    is_finished: bool = False
    """All work is done and in a round."""

    def __bool__(self) -> bool:
        return bool(self.closed or self.freed or self.is_finished)


NOTHING = Change()


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Work for the worker that asked."""

    number: int
    step: int
    share: int
    need: int
    """Version that the weights must at least have for it: the rule's bound, and the worker's own rounds."""
    bound: int = 0
    """The rule's bound alone: parameters that a worker caches may be so old."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing now; ask again when something changed."""

    reason: str
    """What must happen first."""
    on: tuple[str, ...] = ()
    """The workers that it waits for."""
    until: float | None = None
    """Ask again at this time even if nothing changed; None: no need."""
    must_commit: bool = False
    """Do not park it: the worker holds portions that no one else will do, and must commit them before there is more."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run has no more work."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The contribution is kept."""

    round: int
    """The round that has it or will have it; weights that contain it have version ``round + 1`` or more."""
    is_again: bool = False
    """It had been committed before: an answer was lost on its way."""
    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """Another did one of its portions first; the contribution is not used."""

    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """It is older than the bound and not used; its portions are todo again."""

    age: int | None
    """Rounds between its read and now; None when the same answer is given again."""
    change: Change = NOTHING


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The input was wrong and changed no work."""

    reason: str
    change: Change = NOTHING


Taken = Portion | Wait | Finished | Refused
Answer = Committed | Duplicate | Dropped | Refused
