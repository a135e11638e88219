"""What every rank of a plan will move and hold, said before any process starts: calls and bytes by collective, bytes of state.

The numbers are exact. Each rank is rehearsed in this process, one after another (``rehearsal.py``), and the step that is reported
is one like all that follow: the second, when DDP has cut its buckets by the order in which gradients came. A step with a short
batch, at the end of an epoch, moves less. Asynchronous schedules and parameter servers cannot be rehearsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.comm.rehearsal import rehearsed_world
from shoal.comm.trafficcounter import TrafficCounts, plain_traffic
from shoal.core.plan import Plan
from shoal.engine.resolve import resolve_plan
from shoal.tuning.rehearsal import RankTrace, Subject, trace_rank


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """One rank."""

    traffic: TrafficCounts
    """Of one step, by axis and operation."""
    state: Mapping[str, int]
    """Bytes of weights, gradients and optimizer state."""

    @property
    def step_bytes(self) -> int:
        """Bytes of all collectives of a step, as the traffic counter counts them."""
        return sum(traffic.num_bytes for traffic in self.traffic.values())

    @property
    def state_bytes(self) -> int:
        """All that is kept from step to step."""
        return sum(self.state.values())


def forecast_rank(subject: Subject, plan: Plan, rank: int) -> RankForecast:
    """What one rank of a plan will move and hold.

    Raises:
        RequestError: the plan is asynchronous or does not fit the model.
    """
    plan = resolve_plan(subject.recipe.train, plan).plan
    with rehearsed_world(rank, plan.world_size) as world:
        return read_trace(trace_rank(subject, plan, world=world))


def forecast_ranks(subject: Subject, plan: Plan) -> tuple[RankForecast, ...]:
    """The same of all ranks, in their order."""
    plan = resolve_plan(subject.recipe.train, plan).plan
    return tuple(forecast_rank(subject, plan, rank) for rank in range(plan.world_size))


def read_trace(trace: RankTrace) -> RankForecast:
    """What a trace, rehearsed or real, says of every later step."""
    return RankForecast(traffic=plain_traffic(trace.steps[-1].traffic), state=dict(trace.state))
