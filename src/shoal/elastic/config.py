"""What an election by etcd needs, and what becomes of a run that loses replicas: parts of a recipe's ``[elastic]`` section."""

from typing import Literal

from pydantic import Field

from shoal.core.config import Config


class ElectionConfig(Config):
    """How a candidate is let in by etcd."""

    etcd_ca: str | None = None
    """File with the certificates that an election by etcd over https trusts; left out, those of the system."""
    etcd_cert: str | None = None
    """File with this process's certificate, where etcd asks for one; with etcd_key."""
    etcd_key: str | None = None
    """File with the key of etcd_cert, readable by its owner only."""
    etcd_login: str | None = None
    """File with one line USER:PASSWORD for etcd, readable by its owner only."""


class GroupConfig(Config):
    """How a run goes on without some of its replicas."""

    mode: Literal["restart", "shrink"] = "restart"
    """What becomes of a run when a replica dies: all ranks start again from the newest checkpoint (restart, up to max_restarts
    times), or the others go on with the same step and do its share as well (shrink)."""
    min_dp: int = Field(default=1, ge=1)
    """With shrink: with fewer replicas than this the run waits for more, up to start_deadline."""
    max_dp: int | None = Field(default=None, ge=1)
    """With shrink: more replicas than this are not taken in; the plan's dp when left out. Above dp only with batch scale. Below
    dp each replica computes several logical ones from the start, so that a death costs the others a smaller part of a step."""
    spares: int = Field(default=0, ge=0)
    """With shrink: replicas that are started besides and wait, warm, for the place of one that dies."""
    rejoin: bool = False
    """With shrink: start another replica in the place of one that died; it enters at a step boundary when it has its state."""
    copies: int = Field(default=1, ge=0, le=1)
    """With shrink and zero: copies of what only one rank holds, in another replica's memory, refreshed at every step. With 0 the
    death of a replica takes the run back to the newest checkpoint."""
    batch: Literal["hold", "scale"] = "hold"
    """With shrink: the global batch when replicas come and go. Held, those present share it out, and the weights are bit for bit
    those of an undisturbed run; scaled, each replica keeps its share, and the rate follows by optim.scale."""
    max_failures: int = Field(default=3, ge=0)
    """With shrink: failures of one host within an hour after which the next one leaves it out for the rest of the run."""
    straggler_factor: float = Field(default=1.15, gt=1, allow_inf_nan=False)
    """A rank whose steps keep it busy longer than the median rank by this factor is named as a straggler, with the reason."""
    drop_stragglers: bool = False
    """With shrink: leave stragglers out where enough replicas are left."""

    @property
    def starts_more(self) -> bool:
        """Whether processes are started while the run goes on."""
        return self.mode == "shrink" and (self.rejoin or self.spares > 0)

    def replicas_at_start(self, dp: int) -> int:
        """How many replicas a run of a plan with so many logical ones begins with."""
        is_less = self.mode == "shrink" and self.max_dp is not None
        return min(dp, self.max_dp) if is_less and self.max_dp is not None else dp
