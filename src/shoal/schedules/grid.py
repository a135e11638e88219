"""Where stages lie: which rank works on which stage, by the family's way of folding the model over the ranks."""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

from shoal.core.errors import RequestError


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
