"""What a plan is expected to do: one value with time, memory and where both go. By closed forms, or by the schedule itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from shoal.core.pipelines import DEFAULT_SCHEDULE
from shoal.core.plan import EXECUTED, Plan
from shoal.planner.hardware.devices import EXECUTED_PRECISIONS
from shoal.planner.pricing.agreement import Agreement, AgreementTimes, agree_parts, is_exact, price_agreement
from shoal.planner.pricing.closed_form import pipeline_seconds, stages_with_transfers
from shoal.planner.pricing.cost import Known, StepParts, price_parts
from shoal.planner.pricing.job import Job, count_ranks, ranks_of_stages, sum_by_rank
from shoal.planner.pricing.memory import Memory, price_memory
from shoal.planner.simulation.step import schedule_for, simulate_step
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.player import peak_activations
from shoal.schedules.schedule import Schedule

_MOST_CELLS = 4_000
"""Stages times microbatches that are worked through in a search: a fifth of a second."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A plan's step on a cluster."""

    plan: Plan
    precision: str
    """What it computes in."""
    seconds: float
    parts: StepParts
    memory: Memory
    """Of the fullest rank."""
    places: tuple[Memory, ...]
    """Of the ranks at every place of the pipeline; of a plan that a search only looked at, those that are unlike."""
    limit: float
    """Bytes that a device has for it."""
    busy: float
    """Seconds that a pipeline rank computes or talks inside its cells, on the mean."""
    tokens_per_second: float
    utilisation: float
    """Model FLOPs over the peak of all devices: what is recomputed does not count (MFU)."""
    by_schedule: bool = False
    """True where the schedule itself was worked through."""
    agreement: AgreementTimes | None = None
    """How replicas agree, where that is not by a dense sum at every step; ``seconds`` are then the mean over a cycle."""

    @property
    def is_exact(self) -> bool:
        """Whether the plan computes what one process computes."""
        return is_exact(self.plan)

    @property
    def longest_seconds(self) -> float:
        """Of the longest step."""
        if self.agreement is None or self.plan.islands == 1:
            return self.seconds
        alone = self.seconds - self.parts.agree
        return alone + max(self.agreement.exposed(alone))

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.memory.allocated <= self.limit

    @property
    def not_executed(self) -> tuple[str, ...]:
        """What Shoal prices and does not execute yet, in the words of a plan; ``shoal train`` refuses it."""
        return not_executed(self.plan, self.precision)

    @property
    def headroom(self) -> float:
        """Bytes that are left; below zero by how much is missing."""
        return self.limit - self.memory.allocated

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in the pipeline in which they wait for others of it; 0 without one."""
        span = self.seconds - self.parts.after_pipeline
        return max(0.0, 1.0 - self.busy / span) if self.plan.pp > 1 and span > 0 else 0.0

    @property
    def exposed(self) -> Mapping[str, float]:
        """Share of the step that nothing hides of the communication of each axis."""
        parts = self.parts
        busiest = _busiest(parts, self.plan)
        shares: dict[str, float] = {}
        for rank, stage in zip(ranks_of_stages(self.plan), stages_with_transfers(parts, self.plan), strict=True):
            for axis, seconds in stage.exposed.items() if rank == busiest else ():
                if seconds > 0:
                    shares[axis] = shares.get(axis, 0.0) + seconds * parts.microbatches / self.seconds
        along_data = max(0.0, parts.reduce - parts.reduce_hidden) + max(0.0, parts.gather - parts.gather_hidden)
        if along_data > 0:
            shares["dp"] = along_data / self.seconds
        if parts.agree > 0:
            shares["islands"] = parts.agree / self.seconds
        if parts.delay > 0:
            without = pipeline_seconds(replace(parts, transfer=0.0), self.plan)
            shares["pp"] = (pipeline_seconds(parts, self.plan) - without) / self.seconds
        return shares

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "plan": str(self.plan),
            "precision": self.precision,
            "executable": not self.not_executed,
            "not_executed": list(self.not_executed),
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_second,
            "mfu": self.utilisation,
            "bubble": self.bubble,
            "exposed": dict(self.exposed),
            "memory": self.memory.as_dict(),
            "memory_by_place": [place.as_dict() for place in self.places],
            "headroom_bytes": self.headroom,
            "fits": self.fits,
            "by_schedule": self.by_schedule,
            "equals_one_process": self.is_exact,
            "longest_seconds": self.longest_seconds,
            "codec_seconds": 0.0 if self.agreement is None else self.agreement.codec_seconds,
            "agreed_bytes_per_step": None if self.agreement is None else self.agreement.bytes_per_step,
        }


def not_executed(plan: Plan, precision: str) -> tuple[str, ...]:
    """What of a plan in a precision Shoal prices and does not execute yet, in the words of a plan."""
    keys = tuple(
        f"{key.name}={getattr(plan, key.name)}" for key in _NOT_EXECUTED if getattr(plan, key.name) != key.default
    )
    return keys if precision in EXECUTED_PRECISIONS else (*keys, precision)


_NOT_EXECUTED = tuple(key for key in fields(Plan) if key.name not in EXECUTED)


def memory_of(job: Job, plan: Plan, *, every_place: bool = False) -> tuple[Memory, ...]:
    """Memory by the published bounds of the plan's schedule.

    Args:
        job: what is trained, and on what.
        plan: how.
        every_place: of every place of the pipeline, not only of those that may be the fullest.
    """
    return price_memory(job, plan, ranks=None if every_place else _unlike(job, plan))


def estimate(
    job: Job,
    plan: Plan,
    known: Known | None = None,
    *,
    places: tuple[Memory, ...] | None = None,
    agreement: Agreement | None = None,
) -> Estimate:
    """Time and memory by closed forms: some ten thousand plans in a second.

    Args:
        job: what is trained, and on what.
        plan: how.
        known: times of layers from earlier calls for the same job.
        places: its memory (``memory_of``), where that is known.
        agreement: how replicas agree, where that is not by a dense sum at every step.
    """
    parts = price_parts(job, plan, known)
    memory = memory_of(job, plan) if places is None else places
    seconds = pipeline_seconds(parts, plan) + parts.after_pipeline
    return _made(job, plan, parts, seconds, memory, agreement, by_schedule=False)


def _unlike(job: Job, plan: Plan) -> list[int]:
    """Pipeline ranks of which one is the fullest: of ranks with the same layers the first holds the most microbatches."""
    layers = [tuple(sorted(counted.items())) for counted in count_ranks(job.chain, plan)]
    return [rank for rank, own in enumerate(layers) if layers.index(own) == rank]


def estimate_by_schedule(job: Job, plan: Plan, agreement: Agreement | None = None) -> Estimate:
    """The same with the pipeline's time, and its activations in flight, from the schedule that would run.

    Raises:
        RequestError: the schedule cannot be had in this size.
    """
    if plan.pp == 1 or plan.pp * (plan.chunks or 1) * (plan.microbatches or 1) > _MOST_CELLS:
        return estimate(job, plan, places=memory_of(job, plan, every_place=True), agreement=agreement)
    parts = price_parts(job, plan)
    schedule, held = _schedule_of(plan)
    seconds = simulate_step(parts, schedule, plan=plan).step_seconds
    return _made(job, plan, parts, seconds, price_memory(job, plan, held), agreement, by_schedule=True)


def agree_estimate(job: Job, base: Estimate, plan: Plan, agreement: Agreement | None) -> Estimate:
    """The estimate of a plan that differs from a priced one only in how its replicas agree.

    Args:
        job: what is trained, and on what.
        base: of the same plan with whole sums, or of the same islands that never agree.
        plan: with its ``sync`` and ``compress``.
        agreement: what these take.
    """
    return _made(job, plan, base.parts, base.seconds, base.places, agreement, by_schedule=base.by_schedule)


def _schedule_of(plan: Plan) -> tuple[Schedule, Sequence[float]]:
    """The schedule of a plan, and what each of its ranks holds; plans that differ in nothing that it knows of share one."""
    alone = Plan(pp=plan.pp, schedule=plan.schedule, chunks=plan.chunks, microbatches=plan.microbatches or 1)
    # A schedule in a file may be another one the next time.
    return _shared_schedule(alone) if (plan.schedule or DEFAULT_SCHEDULE) in FAMILIES else _new_schedule(alone)


def _new_schedule(plan: Plan) -> tuple[Schedule, Sequence[float]]:
    schedule = schedule_for(plan, plan.microbatches or 1)
    return schedule, peak_activations(schedule)


# To make one and to prove it legal takes a tenth of a second, and the best plans of a search differ in little else than zero.
_shared_schedule = lru_cache(maxsize=32)(_new_schedule)


def _made(
    job: Job,
    plan: Plan,
    parts: StepParts,
    seconds: float,
    memory: tuple[Memory, ...],
    agreement: Agreement | None,
    *,
    by_schedule: bool,
) -> Estimate:
    """An estimate of a plan whose step takes so long without its own way to agree."""
    times = None
    if agreement is not None:
        times = price_agreement(job, plan, agreement)
        agreed = agree_parts(parts, plan, times, seconds)
        seconds += agreed.after_pipeline - parts.after_pipeline
        parts = agreed
        memory = tuple(replace(place, agreement=agreement.kept_bytes) for place in memory)
    tokens = job.global_batch * job.chain.tokens
    flops = 3.0 * job.chain.forward_flops * job.global_batch
    peak = job.cluster.device.flops(job.precision) * plan.world_size
    return Estimate(
        plan=plan,
        precision=job.precision,
        seconds=seconds,
        parts=parts,
        memory=max(memory, key=lambda one: one.allocated),
        places=memory,
        limit=job.cluster.device.free_bytes,
        busy=parts.microbatches * sum(_work(parts, plan)) / plan.pp,
        tokens_per_second=tokens / seconds,
        utilisation=flops / (peak * seconds),
        by_schedule=by_schedule,
        agreement=times,
    )


def _work(parts: StepParts, plan: Plan) -> list[float]:
    """Seconds of one microbatch in all cells of each pipeline rank."""
    return sum_by_rank(plan, [stage.forward + stage.backward for stage in stages_with_transfers(parts, plan)])


def _busiest(parts: StepParts, plan: Plan) -> int:
    work = _work(parts, plan)
    return work.index(max(work))
