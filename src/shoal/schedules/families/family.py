"""A family of schedules: a name, a way of laying stages over ranks, a generator of rows, and what it promises."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.schedules.schedule import Fold, Grid, Row, Updates


@dataclass(frozen=True, slots=True)
class Size:
    """What a schedule is generated for."""

    ranks: int
    microbatches: int
    chunks: int
    """Stages per rank."""
    replicas: tuple[int, ...] = ()
    """Ranks of every stage, which take turns at the microbatches; empty where every rank has stages of its own."""

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.replicas) if self.replicas else self.ranks * self.chunks

    def grid(self, fold: Fold) -> Grid:
        """Where stages lie in a family's fold, or by turns."""
        laid = Fold.TURNS if self.replicas else fold
        return Grid(laid, self.ranks, self.stages, self.microbatches, self.replicas)


def no_problems(size: Size) -> Iterator[str]:
    """For families that take every size."""
    yield from ()


def one_version(size: Size, rank: int) -> int:
    """For families that change weights after a flush."""
    return 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the catalogue."""

    name: str
    summary: str
    """What sets it apart, in one line."""
    source: str
    """The paper that describes it."""
    fold: Fold
    rows: Callable[[Size], tuple[Row, ...]]
    activations: Callable[[Size, int], int]
    """Most microbatches of one stage that a rank holds at once."""
    versions: Callable[[Size, int], int] = one_version
    """Most versions of its weights that a rank holds at once."""
    problems: Callable[[Size], Iterator[str]] = no_problems
    """Why a size cannot be had, each with the numbers and the fix."""
    chunks: int | None = 1
    """Stages per rank; None where the user may choose."""
    default_chunks: int = 2
    """What ``chunks`` is when the user may choose and does not."""
    takes_replicas: bool = False
    """A stage may have several ranks, which take turns at the microbatches."""
    updates: Updates = Updates.FLUSH
    accumulates: bool = False
    """Weights change once per step's microbatches, without a flush."""
