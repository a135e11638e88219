"""Which plans of a search need no price: those whose least time is already beyond all that the search goes on with.

A search over layouts with experts and long sequences has fifty thousand plans, and goes on with ten. What a layout takes at least
(``cost.least_seconds``) costs next to nothing, so plans are looked at in that order, and what is beyond is left out.
"""

import math
from dataclasses import dataclass, field

from shoal.core.plan import Plan
from shoal.planner.estimate import Estimate, not_executed

_ALIKE = 1.002
"""Times that differ by less may change places: a ranking goes by four digits, and by simplicity among equals."""


@dataclass(kw_only=True)
class Cutoff:
    """How long the slowest takes of the plans that a search goes on with, as far as they are found."""

    precision: str
    num_best: int
    """Plans that the search goes on with."""
    num_executed: int
    """Plans that Shoal executes, with which it goes on too."""
    num_pipelines: int
    """Layouts with a pipeline, with which it goes on too; the best plan of each."""
    _best: dict[object, float] = field(default_factory=dict)
    _executed: dict[object, float] = field(default_factory=dict)
    _pipelines: dict[object, float] = field(default_factory=dict)

    def add(self, found: Estimate) -> None:
        """Take note of a plan that fits."""
        _keep(self._best, found.plan, found.seconds, self.num_best)
        if not found.not_executed:
            _keep(self._executed, found.plan, found.seconds, self.num_executed)
        if found.plan.pp > 1:
            _keep(self._pipelines, layout_of(found.plan), found.seconds, self.num_pipelines)

    def is_beyond(self, plan: Plan, least: float) -> bool:
        """Whether a plan that takes so long at least cannot be among those that the search goes on with."""
        return (
            least > _slowest(self._best, self.num_best)
            and (plan.pp == 1 or least > _slowest(self._pipelines, self.num_pipelines))
            and (least > _slowest(self._executed, self.num_executed) or bool(not_executed(plan, self.precision)))
        )


def layout_of(plan: Plan) -> tuple[object, ...]:
    """How a plan shares out the devices."""
    return (plan.dp, plan.tp, plan.cp, plan.pp, plan.ep)


def _keep(times: dict[object, float], key: object, seconds: float, most: int) -> None:
    """The few fastest, each key once."""
    times[key] = min(seconds, times.get(key, math.inf))
    if len(times) > most:
        del times[max(times, key=lambda each: times[each])]


def _slowest(times: dict[object, float], most: int) -> float:
    """Beyond which nothing is kept any more."""
    return _ALIKE * max(times.values(), default=0.0) if len(times) >= most else math.inf
