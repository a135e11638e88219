"""Other ways for replicas to agree than a dense sum at every step: policies between islands and compressed sums, ranked.

None of them equals one process, so they stand apart from a ranking of plans, and nothing chooses one by itself. A codec is worth
its arithmetic only where that takes less than the bytes that it saves; each is held to the same plan without it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.engine.resolve import compression_settings
from shoal.planner.pricing.agreement import Agreement
from shoal.planner.pricing.cost import Known
from shoal.planner.pricing.job import Job
from shoal.planner.search.candidates import Limits, is_legal, plans_of
from shoal.planner.search.estimate import Estimate, agree_estimate, estimate, estimate_by_schedule
from shoal.planner.search.search import AS_GOOD, search
from shoal.replicas.fragments import count_layers
from shoal.trainer.config import Recipe
from shoal.tuning.agreement import agreement_of

CODECS = (
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "qsgd:4",
    "natural",
    "sign",
    "powersgd:2",
    "powersgd:4",
    "topk:0.01",
    "randk:0.01",
    "dgc:0.01",
)
"""Codecs that are tried. What ``threshold`` sends depends on values, and what ``onebit@S`` gains on S: priced where asked for."""
POLICIES = (
    "local:10",
    "diloco:50",
    "stream:48,4,2",
    "sparse:50,0.03",
    "slowmo:48",
    "easgd:10",
    "gossip:ring",
    "gossip:exponential",
    "pushsum:exponential",
)
"""Policies that are tried, with the periods that they have where nobody says one."""
BETWEEN = ("int8", "int4")
"""Codecs that are tried between islands too."""
FEW_DEVICES = 64
"""Up to so many devices these are looked for where nobody asks."""
WORTH_SAYING = 0.9
"""Of the best plan's step, what another way must take at most to be shown where nobody asks."""
_CODED = ("local", "diloco", "stream", "gossip:ring")
"""Policies of which codecs are tried: they sum a change of weights, or send it to neighbours that stay the same."""
_INSIDE = 3
"""Plans of an island that are tried."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A plan whose replicas agree in another way."""

    found: Estimate
    dense: Estimate
    """The same plan with whole sums: of a codec, without it; of a policy, the best plan that sums all gradients at every step."""

    @property
    def is_worth(self) -> bool:
        """Whether the codec takes less than it saves, or the policy less than a sum at every step."""
        return self.found.seconds < self.dense.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.found.as_dict(),
            "dense_plan": str(self.dense.plan),
            "dense_seconds": self.dense.seconds,
            "is_worth": self.is_worth,
        }


def other_ways(recipe: Recipe, job: Job, limits: Limits, best: Estimate, *, top: int, every: bool) -> tuple[Way, ...]:
    """The fastest of each policy and codec that fit, fastest first.

    Args:
        recipe: whose settings allow some codecs and not others.
        job: what is trained, and on what.
        limits: what the search for the best plan left out.
        best: plan of those that equal one process.
        top: how many are wanted.
        every: those that are no faster than the best too.
    """
    price = _Pricing(recipe, job, limits)
    found = sorted([*price.codecs(), *price.policies(best)], key=lambda one: one.found.seconds)
    if not every:
        found = [one for one in found if one.is_worth and one.found.seconds < WORTH_SAYING * best.seconds]
        found = [one for one in found if not _is_idle(one, found)]
    return tuple(found[:top])


class _Pricing:
    """Prices of one job's plans, with what they share."""

    def __init__(self, recipe: Recipe, job: Job, limits: Limits) -> None:
        self._recipe, self._job, self._limits = recipe, job, limits
        self._known: Known = {}
        self._agreements: dict[object, Agreement | None] = {}

    def codecs(self) -> Iterator[Way]:
        """The best plan of each codec, by its schedule."""
        bases = [one for one in self._data_parallel() if one.fits]
        by_schedule: dict[Plan, Estimate] = {}
        for codec in CODECS:
            best = min(self._agreed(bases, compress=codec), key=lambda way: way.found.seconds, default=None)
            if best is not None:
                plan = best.dense.plan
                if plan not in by_schedule:
                    by_schedule[plan] = estimate_by_schedule(self._job, plan)
                yield from self._agreed([by_schedule[plan]], compress=codec)

    def policies(self, best: Estimate) -> Iterator[Way]:
        """The best plan of each policy, alone and with what islands send compressed."""
        inside = [[estimate_by_schedule(self._job, plan) for plan in self._inside(count)] for count in self._counts()]
        names = [name for layer in self._job.chain.layers for name, _ in layer.shapes]
        for policy in POLICIES:
            if SyncRule.parse(policy).fragments > count_layers(names):
                continue
            for codec in (None, *(BETWEEN if policy.startswith(_CODED) else ())):
                # Of the plans of an island, which are in their order already, the first that has room for the policy.
                ways = [next(self._agreed(plans, sync=policy, compress=codec), None) for plans in inside]
                found = [way.found for way in ways if way is not None]
                if found:
                    yield Way(found=min(found, key=lambda one: one.seconds), dense=best)

    def _agreed(
        self, bases: Sequence[Estimate], *, sync: str = "allreduce", compress: str | None = None
    ) -> Iterator[Way]:
        """The plans with another way to agree, of those that can be and fit."""
        for base in bases:
            plan = replace(base.plan, sync=sync, compress=compress)
            if _is_plan(self._recipe, plan, self._limits):
                found = agree_estimate(self._job, base, plan, self._agreement(plan))
                if found.fits:
                    yield Way(found=found, dense=base)

    def _agreement(self, plan: Plan) -> Agreement | None:
        # What replicas move depends on what they hold, and not on how a replica goes about its share.
        key = (plan.islands, plan.dp, plan.tp, plan.pp, plan.chunks, plan.schedule, plan.zero, plan.sync, plan.compress)
        if key not in self._agreements:
            recipe = self._recipe
            self._agreements[key] = agreement_of(
                self._job,
                plan,
                compression=recipe.compression,
                sparse_bits=recipe.replicas.sparse_bits,
                seed=recipe.train.seed,
            )
        return self._agreements[key]

    def _data_parallel(self) -> Iterator[Estimate]:
        """Plans with replicas and without what a compressed sum is refused with; as little recompute as fits."""
        limits = replace(self._limits, most_tensor=1, schedules=("1f1b",))
        for plan in plans_of(self._job, limits):
            if (plan.dp or 1) == 1 or plan.cp > 1 or plan.ep > 1 or not is_legal(plan, limits):
                continue
            for recompute in ("none", "selective", "full"):
                found = estimate(self._job, replace(plan, recompute=recompute), self._known)
                if found.fits:
                    yield found
                    break

    def _counts(self) -> list[int]:
        """Islands that are tried: a node each, and two; of one node, a device each."""
        devices, per_node = self._job.cluster.num_devices, self._job.cluster.devices_per_node
        counts = {2, devices // per_node if devices > per_node else devices}
        batch = self._job.global_batch
        return sorted(one for one in counts if one > 1 and devices % one == 0 and batch % one == 0)

    def _inside(self, count: int) -> list[Plan]:
        """The best plans of one of ``count`` islands."""
        job = self._job
        own = replace(
            job, cluster=job.cluster.resized(job.cluster.num_devices // count), global_batch=job.global_batch // count
        )
        return [replace(one.plan, islands=count) for one in search(own, self._limits, top=_INSIDE).ranked]


def _is_idle(way: Way, others: Sequence[Way]) -> bool:
    """Whether a policy is as fast without what it compresses."""
    plan = way.found.plan
    if plan.islands == 1 or plan.compress is None:
        return False
    plain = (one.found.seconds for one in others if (one.found.plan.sync, one.found.plan.compress) == (plan.sync, None))
    return any(seconds <= way.found.seconds * AS_GOOD for seconds in plain)


def _is_plan(recipe: Recipe, plan: Plan, limits: Limits) -> bool:
    """Whether the model and the recipe's settings allow a plan; expert parallelism is priced before it is executed."""
    return is_legal(plan, limits) and not compression_settings(recipe.train, recipe.optim, recipe.compression, plan)
