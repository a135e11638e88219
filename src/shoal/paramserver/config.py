"""The ``[paramserver]`` section of a recipe: how old gradients are treated, what workers cache, and who counts as dead."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shoal.core.config import Config
from shoal.paramserver.consistency import Aggregate


class ParamServerConfig(Config):
    """Parameter servers, beyond what the plan says."""

    aggregate: Aggregate = "average"
    """How contributions become one update: mean by samples, sum of their own means, Adasum, or fednova (with local_steps)."""
    staleness_aware: bool = False
    """Divide a gradient that is tau rounds old by max(1, tau); under async and downpour."""
    drop_beyond: int | None = Field(default=None, ge=0)
    """Oldest gradient that still counts, in rounds; an older one is dropped and its portion is computed again."""
    delay_compensation: float = Field(default=0.0, ge=0)
    """Lambda of g + lambda g g (w_now - w_read), which corrects an old gradient to first order; 0 is off."""
    duplicate_after: float | None = Field(default=None, gt=1)
    """Give a portion that takes longer than so many mean step times to an idle worker as well; the first result counts."""
    overlap: bool = False
    """Push while the next portion is computed, and pull under async, ssp and downpour; its weights lack what is under way."""
    local_lr: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Rate of a worker's own steps (downpour, local_steps), by worker, the last for all further ones; else the recipe's."""
    local_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps that a worker takes by itself in a portion, by worker, the last for all further ones; with aggregate fednova."""
    batch_shares: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Size of a worker's portion beside the others', by worker, the last for all further ones; left out, all are alike.

    [3, 1] gives worker 0 three quarters of a step's samples. A portion that its worker does not take goes to whoever is free.
    """
    warm_start: int = Field(default=0, ge=0)
    """Portions that the first worker does alone before the others begin, under downpour."""
    lbfgs_lr: float = Field(default=1.0, gt=0)
    """Step that the line search of lbfgs tries first, in lengths of its direction."""
    lbfgs_history: int = Field(default=10, ge=1)
    """Steps that lbfgs remembers; servers hold two vectors of the weights' size for each and up to ten more."""
    lbfgs_search: Literal["strong_wolfe", "fixed"] = "strong_wolfe"
    """How lbfgs finds the length of a step; fixed takes lbfgs_lr as it is."""
    lbfgs_tolerance: float = Field(default=1e-7, ge=0)
    """Largest element of a gradient at which lbfgs has arrived and moves no more."""
    hot: tuple[str, ...] | Literal["measured"] = ()
    """Parameters kept on the first server and read fresh, by pattern; or "measured".

    By pattern, all others are cached where cache_staleness allows. Measured, nothing is placed: tensors whose first gradients
    touch few rows send only these, and what is cached are servers that hold hardly anything else.
    """
    cache_staleness: int = Field(default=0, ge=0)
    """Cached parameters may be so many rounds behind the first server's at a worker before they are pulled again; see hot."""
    centers: int = Field(default=2, ge=1)
    """Candidates for the center: one leads, the others wait."""
    lease_seconds: float = Field(default=2.0, gt=0.2)
    """How long a center may be silent before another is elected; a dead one is replaced at once."""
    dead_seconds: float = Field(default=5.0, gt=0.5)
    """How long a server or worker may be silent before it counts as dead; one that died on this machine counts at once."""
    deadline: float = Field(default=60.0, gt=0)
    """The longest wait for a server, backup or center, beside the time that payloads have, before a process names it."""
    hang_after: float = Field(default=50.0, ge=0)
    """A worker that is in one portion for so many of its usual ones, and hang_seconds, ends and is started again; 0: never.

    Usual is the median of its last twenty; no portion is taken to hang that lasts less than twice the longest of them.
    """
    hang_seconds: float = Field(default=60.0, gt=0)
    """No portion is taken to hang before it has lasted so long; see hang_after."""
    max_respawns: int = Field(default=200, ge=0)
    """How many dead servers, workers and centers are started again in one run."""

    @field_validator("hot", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value != "measured" else value

    @field_validator("local_lr", "local_steps", "batch_shares", mode="before")
    @classmethod
    def _one_for_all(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    def own_steps(self, index: int) -> int:
        """The local steps of a worker."""
        return self.local_steps[min(index, len(self.local_steps) - 1)] if self.local_steps else 1

    def portion_sizes(self, workers: int) -> tuple[float, ...] | None:
        """How large the portions of a step are beside each other; None: all alike."""
        if not self.batch_shares:
            return None
        return tuple(self.batch_shares[min(index, len(self.batch_shares) - 1)] for index in range(workers))

    def own_rate(self, index: int) -> float | None:
        """The rate of a worker's own steps; None: the recipe's."""
        return self.local_lr[min(index, len(self.local_lr) - 1)] if self.local_lr else None
