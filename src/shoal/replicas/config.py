"""The ``[replicas]`` section of a recipe: what the plan's ``sync`` leaves open."""

from typing import Literal

from pydantic import Field

from shoal.core.config import Config
from shoal.core.syncrule import SyncKind


class ReplicaConfig(Config):
    """How islands agree, beyond what the plan's ``sync`` says."""

    outer_lr: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    """Rate of the outer step of diloco and stream."""
    outer_momentum: float | None = Field(default=None, ge=0, lt=1)
    """Nesterov momentum of the outer step; left out: 0.5 for diloco and 0.9 for stream. The papers' 0.9 adds up to seven times a
    change that persists: with rounds of 20 steps diloco ended above one replica alone by it, and stream, whose islands keep a
    share of their own progress, closer to dense than by 0.5."""
    mixing: float = Field(default=0.5, ge=0, lt=1)
    """Share of its own progress that an island keeps when a fragment of stream is applied; 0 takes the agreed weights."""
    slow_lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Rate of the slow step of slowmo."""
    slow_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of the slow step of slowmo."""
    gossip_rate: float = Field(default=0.5, gt=0, le=1)
    """How far an island of gossip with compress goes to what it knows of its neighbours; the coarser the codec, the less."""
    pull: float | None = Field(default=None, gt=0, lt=1)
    """Share of the way to the center that an island of easgd goes at a round; 0.9 over the number of islands when left out."""
    sparse_decay: float = Field(default=0.95, ge=0, le=1)
    """What is left at the next round of what an island of sparse has not sent."""
    sparse_bits: Literal[2, 32] = 32
    """Bits of each value that an island of sparse sends; 2 rounds to thirds of the chunk's largest, and keeps what that loses."""
    weigh: Literal["equal", "samples"] = "equal"
    """What an island's change counts in the mean of local, diloco, stream and slowmo: as much as any other's, or by the samples
    that it learnt from since the last round, which differ where the last batch of an epoch is short or steps are left out."""
    distance: int = Field(default=0, ge=0)
    """Every so many rounds, measure how far islands are apart, which costs one more exchange of the size of the model; 0 measures
    at evaluations and at the end only, where the mean of the islands is there anyway."""
    interval: Literal["fixed", "qsr", "adacomm"] = "fixed"
    """How the steps between rounds of local change: never, longer as the learning rate falls (the quadratic rule), or shorter as
    the validation loss falls (AdaComm, from the first evaluation on)."""
    interval_scale: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """The quadratic rule's coefficient: a round is (this / learning rate at its first step) squared steps long, or the plan's H
    where that is more; in warm-up the plan's H."""

    def outer_momentum_of(self, kind: SyncKind) -> float:
        """The momentum of a policy's outer step."""
        if self.outer_momentum is not None:
            return self.outer_momentum
        return 0.9 if kind == "stream" else 0.5
