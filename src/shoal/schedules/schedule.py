"""What each pipeline rank does, in order, as data: actions, the ranks on which stages lie, and the schedule itself.

An action is what a stage does with a microbatch; it prints and parses as ``2F0``. Two actions that a rank overlaps share one
cell and print as ``torch.distributed.pipelining`` writes them: ``(0F4;7B1)OVERLAP_F_B``.

One value, four readers: the runtime executes it, ``player`` gives it times, ``rules`` prove it legal, ``draw`` and ``svg`` show
it.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

from shoal.core.errors import RequestError

_OVERLAP = "OVERLAP_F_B"
_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)" + _OVERLAP)


class Kind(StrEnum):
    """What is computed."""

    FORWARD = "F"
    BACKWARD = "B"
    """Whole: gradients of the input and of the weights."""
    INPUT = "I"
    """The gradient of the input alone: what the stage before waits for."""
    WEIGHT = "W"
    """The gradient of the weights, which nobody waits for."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's work on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Cell = tuple[Action, ...]
"""One action, or a forward and a backward that overlap."""


def parse_action(text: str) -> Action:
    """Read ``2F0``.

    Raises:
        RequestError: it is no action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise RequestError(
            f"{text.strip()!r} is no action; write stage, one of F, B, I, W, and microbatch, such as 2F0"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch))


def parse_cell(text: str) -> Cell:
    """Read ``2F0`` or ``(0F4;7B1)OVERLAP_F_B``.

    Raises:
        RequestError: it is neither.
    """
    match = _PAIR.fullmatch(text.strip())
    return (parse_action(match[1]), parse_action(match[2])) if match else (parse_action(text),)


def write_cell(cell: Cell) -> str:
    """The reverse of ``parse_cell``."""
    return str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))}){_OVERLAP}"


class Fold(StrEnum):
    """How a chain of stages is laid over a row of ranks."""

    LINE = "line"
    """Stage s on rank s."""
    LOOP = "loop"
    """Stage s on rank s mod P: the chain goes round the ranks once per chunk."""
    VEE = "vee"
    """Down the ranks and back: stage s >= P on rank 2P-1-s, so the last stage is on the first rank."""
    CROSS = "cross"
    """Two copies of the model, one laid down the ranks and one up: stage s on ranks s and P-1-s."""
    TURNS = "turns"
    """A line in which a stage may have several ranks, side by side: of R of them, number m mod R has microbatch m."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The stages of a model over the ranks of a pipeline."""

    fold: Fold
    num_ranks: int
    num_stages: int
    num_microbatches: int
    replicas: tuple[int, ...] = ()
    """Ranks of every stage where they take turns; empty in every other fold."""

    def __post_init__(self) -> None:
        if self.fold is Fold.TURNS:
            self._check_replicas()
            return
        per_rank = {Fold.LINE: 1, Fold.VEE: 2, Fold.CROSS: 1}.get(self.fold)
        if per_rank is not None and self.num_stages != per_rank * self.num_ranks:
            raise RequestError(
                f"a {self.fold} has {per_rank * self.num_ranks} stages on {self.num_ranks} ranks, not {self.num_stages}"
            )
        if self.num_stages % self.num_ranks:
            raise RequestError(f"{self.num_stages} stages cannot be dealt to {self.num_ranks} ranks evenly")

    def _check_replicas(self) -> None:
        if (len(self.replicas), sum(self.replicas)) != (self.num_stages, self.num_ranks) or min(self.replicas) < 1:
            raise RequestError(
                f"{self.num_stages} stages with {list(self.replicas)} ranks do not lie on {self.num_ranks} ranks; give every "
                f"stage 1 or more, {self.num_ranks} together"
            )

    def __str__(self) -> str:
        """How many of everything, in words."""
        counts = (
            (self.num_ranks, "rank", "s"),
            (self.num_stages, "stage", "s"),
            (self.num_microbatches, "microbatch", "es"),
        )
        return ", ".join(f"{count} {word}{'' if count == 1 else ending}" for count, word, ending in counts)

    @property
    def chunks(self) -> int:
        """Stages per rank; those of the other copy of a cross are not counted."""
        return 1 if self.fold is Fold.TURNS else self.num_stages // self.num_ranks

    @property
    def directions(self) -> int:
        """Ways in which microbatches go through the ranks."""
        return 2 if self.fold is Fold.CROSS else 1

    @property
    def has_copies(self) -> bool:
        """True when some stage is on more than one rank."""
        return self.fold is Fold.CROSS or max(self.replicas, default=1) > 1

    def goes_down(self, microbatch: int) -> bool:
        """False for the microbatches that enter a cross at the last rank: the second half of them."""
        return self.fold is not Fold.CROSS or microbatch < (self.num_microbatches + 1) // 2

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that works on a stage of a microbatch."""
        if self.fold is Fold.TURNS:
            return _first_ranks(self.replicas)[stage] + microbatch % self.replicas[stage]
        if self.fold is Fold.CROSS and not self.goes_down(microbatch):
            return self.num_ranks - 1 - stage
        if self.fold is Fold.VEE and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage, in the order of its copies."""
        if self.fold is Fold.TURNS:
            first = _first_ranks(self.replicas)[stage]
            return tuple(range(first, first + self.replicas[stage]))
        probes = (0,) if self.fold is not Fold.CROSS else (0, self.num_microbatches - 1)
        return tuple(self.rank_of(stage, probe) for probe in probes)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, in the order of the chain."""
        if self.fold is Fold.TURNS:
            return (bisect_right(_first_ranks(self.replicas), rank) - 1,)
        return tuple(stage for stage in range(self.num_stages) if rank in self.ranks_of(stage))


# Asked for every cell of a schedule.
@lru_cache(maxsize=1024)
def _first_ranks(replicas: tuple[int, ...]) -> tuple[int, ...]:
    """The first rank of every stage."""
    return tuple(accumulate(replicas[:-1], initial=0))


Row = tuple[Cell, ...]


class Updates(StrEnum):
    """When weights change, and which version of them a microbatch sees."""

    FLUSH = "flush"
    """Once, when all microbatches are done: what one process does."""
    STASHED = "stashed"
    """After every microbatch's backward; that backward uses the weights of its forward on this stage (PipeDream)."""
    VERTICAL = "vertical"
    """After every microbatch's backward; a microbatch uses on all stages the version that it met on the first (vertical sync)."""
    BUFFERED = "buffered"
    """After every ``accumulate`` microbatches, without a flush; they use the version before the newest (2BW)."""

    @property
    def are_asynchronous(self) -> bool:
        """True when the next step's microbatches enter while this step's are still on their way."""
        return self is not Updates.FLUSH


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The cells of every rank, in the order in which the rank works on them."""

    name: str
    grid: Grid
    rows: tuple[Row, ...]
    updates: Updates = Updates.FLUSH
    accumulate: int = 1
    """Microbatches per update where weights change without a flush."""
    activation_bound: tuple[int, ...] | None = None
    """Microbatches of one stage that a rank may hold at once, by rank; None where the family promises nothing."""
    version_bound: tuple[int, ...] | None = None
    """Versions of its weights that a rank may hold at once, by rank."""

    @property
    def splits_backward(self) -> bool:
        """True when some backward is cut into its input and weight parts."""
        return any(action.kind is Kind.INPUT for row in self.rows for cell in row for action in cell)

    def actions(self, rank: int) -> Iterator[Action]:
        """A rank's actions; those that overlap one after the other."""
        for cell in self.rows[rank]:
            yield from cell


class Point(StrEnum):
    """What an action leaves behind for others."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    """Of the stage's input."""
    WEIGHTS = "weights"
    """The gradient of the stage's weights; the microbatch's activations are free."""


Result = tuple[Point, int, int]
"""A point of a stage and a microbatch."""

_MADE = {
    Kind.FORWARD: (Point.OUTPUT,),
    Kind.INPUT: (Point.GRADIENT,),
    Kind.WEIGHT: (Point.WEIGHTS,),
    Kind.BACKWARD: (Point.GRADIENT, Point.WEIGHTS),
}


def made_by(action: Action) -> tuple[Result, ...]:
    """What is there once this action is done."""
    return tuple((point, action.stage, action.microbatch) for point in _MADE[action.kind])


def needs_of(action: Action, num_stages: int) -> tuple[Result, ...]:
    """What must be there before this action: results of its own rank, and what other ranks send."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return ((Point.OUTPUT, stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.WEIGHT:
        return ((Point.GRADIENT, stage, microbatch),)
    own = (Point.OUTPUT, stage, microbatch)
    return (own,) if stage == num_stages - 1 else (own, (Point.GRADIENT, stage + 1, microbatch))


def receiver_of(result: Result, grid: Grid) -> int | None:
    """The rank that a result is sent to; None where no other rank needs it."""
    point, stage, microbatch = result
    neighbour = {Point.OUTPUT: stage + 1, Point.GRADIENT: stage - 1}.get(point, -1)
    if not 0 <= neighbour < grid.num_stages:
        return None
    receiver = grid.rank_of(neighbour, microbatch)
    return None if receiver == grid.rank_of(stage, microbatch) else receiver


def frees_activations(action: Action) -> bool:
    """True when the microbatch is done with on this stage."""
    return Point.WEIGHTS in _MADE[action.kind]
