"""Where stages lie: which rank works on which stage, by the family's way of folding the model over the ranks."""

from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class Grid:
    """The stages of a model over the ranks of a pipeline."""

    fold: Fold
    num_ranks: int
    num_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        per_rank = {Fold.LINE: 1, Fold.VEE: 2, Fold.CROSS: 1}.get(self.fold)
        if per_rank is not None and self.num_stages != per_rank * self.num_ranks:
            raise RequestError(
                f"a {self.fold} has {per_rank * self.num_ranks} stages on {self.num_ranks} ranks, not {self.num_stages}"
            )
        if self.num_stages % self.num_ranks:
            raise RequestError(f"{self.num_stages} stages cannot be dealt to {self.num_ranks} ranks evenly")

    def __str__(self) -> str:
        """How many of everything, in words."""
        counts = (
            (self.num_ranks, "rank", "s"),
            (self.num_stages, "stage", "s"),
            (self.num_microbatches, "microbatch", "es"),
        )
        return ", ".join(f"{count} {word}{'' if count == 1 else ending}" for count, word, ending in counts)

    @property
    def replicas(self) -> int:
        """Ranks that hold one stage."""
        return 2 if self.fold is Fold.CROSS else 1

    def goes_down(self, microbatch: int) -> bool:
        """False for the microbatches that enter a cross at the last rank: the second half of them."""
        return self.fold is not Fold.CROSS or microbatch < (self.num_microbatches + 1) // 2

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that works on a stage of a microbatch."""
        if self.fold is Fold.CROSS and not self.goes_down(microbatch):
            return self.num_ranks - 1 - stage
        if self.fold is Fold.VEE and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, in the order of the chain."""
        probes = (0, self.num_microbatches - 1)
        found = {stage for stage in range(self.num_stages) for probe in probes if self.rank_of(stage, probe) == rank}
        return tuple(sorted(found))
