"""What makes ranks unlike: slower devices, stragglers, seeded slow-downs of devices and links. Values in, factors by rank out.

Ranks that share a microbatch (``tp``, ``cp``) go at the pace of the slowest of them, so what counts is one factor for each
pipeline place of each replica. Replicas whose factors are alike are **folded**: one of them is played for all.

What would take longer than about half a minute is refused, with the largest that is taken. Python works through the cells of a
schedule one by one, to find their order and to play them; numpy plays many steps and many replicas beside each other. So a
schedule has a number of cells at most, and steps by what a step costs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.core.seeding import derive_key

Array = NDArray[np.float64]
GRID = (Axis.PIPELINE, Axis.DATA, Axis.CONTEXT, Axis.TENSOR)
"""The order of ranks, slowest first: that of ``comm/mesh.py``."""
MOST_JITTER = 100.0
"""A mean slow-down beyond it is no jitter of a device that works."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Ranks that take ``factor`` times as long: one rank, or all with one index along an axis."""

    factor: float
    index: int
    axis: Axis | None = None
    """None: ``index`` is a rank."""

    def __str__(self) -> str:
        who = f"rank {self.index}" if self.axis is None else f"{self.axis.value}={self.index}"
        return f"{who} x {self.factor:g}"


_SLOW = re.compile(r"(?:(?P<axis>[a-z]+)=)?(?P<index>\d+):(?P<factor>.+)")


def parse_slow(text: str) -> Slow:
    """Read ``3:1.5``, rank 3, or ``pp=1:1.5``, all ranks of the second pipeline place: they take 1.5 times as long.

    Raises:
        RequestError: the text is something else.
    """
    found = _SLOW.fullmatch(text.strip())
    axes = [axis.value for axis in (*GRID, Axis.ISLAND)]
    try:
        if found is None or (found["axis"] and found["axis"] not in axes):
            raise ValueError
        factor = float(found["factor"])
    except ValueError:
        raise RequestError(
            f"{text!r} is neither RANK:FACTOR nor AXIS=INDEX:FACTOR; write 3:1.5 or pp=1:1.5, with an axis of {', '.join(axes)}"
        ) from None
    return Slow(index=int(found["index"]), factor=factor, axis=Axis(found["axis"]) if found["axis"] else None)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a cluster differs from its data sheet."""

    slow: tuple[Slow, ...] = ()
    jitter: float = 0.0
    """Mean slow-down of a rank in a step, as a share: each step every rank draws its own, exponentially distributed."""
    link_jitter: float = 0.0
    """The same of a rank's links: transfers, sums and gathers."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, share in (("jitter", self.jitter), ("link jitter", self.link_jitter)):
            if not 0 <= share <= MOST_JITTER:
                raise RequestError(
                    f"{name} is {share:g}, and must be 0 to {MOST_JITTER:g}; 0.05 is a mean slow-down of 5%"
                )

    @property
    def varies(self) -> bool:
        """True when steps differ from each other."""
        return self.jitter > 0 or self.link_jitter > 0


def shape_of(plan: Plan) -> tuple[int, int, int, int]:
    """Ranks along each axis of ``GRID``."""
    pp, dp, cp, tp = (plan.degree(axis) for axis in GRID)
    return pp, dp, cp, tp


def check_conditions(conditions: Conditions, plan: Plan) -> None:
    """Refuse ranks that a plan does not have, and times that cannot be.

    Raises:
        RequestError: gives both numbers.
    """
    for slow in conditions.slow:
        count = plan.world_size if slow.axis is None else plan.degree(slow.axis)
        if slow.axis is Axis.EXPERT:
            raise RequestError("ep has no ranks of its own; name a rank, or an index along pp, dp, cp or tp")
        if not 0 <= slow.index < count:
            what = "ranks" if slow.axis is None else f"ranks along {slow.axis.value}"
            raise RequestError(
                f"{slow}: plan {str(plan)!r} has {count} {what}, 0 to {count - 1}; name one of them, or change the plan"
            )
        if not 0 < slow.factor < float("inf"):
            raise RequestError(
                f"{slow}: a factor must be above 0; 2 takes twice as long, 0.5 half as long as the cluster's device"
            )


@dataclass(frozen=True, eq=False)
class Factors:
    """How many times as long things take, by (pipeline place, replica)."""

    compute: Array
    links: Array


def factors_of(plan: Plan, conditions: Conditions, step: int = 0) -> Factors:
    """What one step meets. The draws belong to (seed, step, rank), and to nothing else."""
    shape = shape_of(plan)
    compute = np.ones(shape)
    for slow in conditions.slow:
        if slow.axis is None:
            compute[np.unravel_index(slow.index, shape)] *= slow.factor
        else:
            compute[tuple(slow.index if axis is slow.axis else slice(None) for axis in GRID)] *= slow.factor
    links = np.ones(shape)
    if conditions.jitter:
        compute *= 1.0 + conditions.jitter * _draws(shape, conditions.seed, "compute", step)
    if conditions.link_jitter:
        links *= 1.0 + conditions.link_jitter * _draws(shape, conditions.seed, "links", step)
    return Factors(compute.max(axis=(2, 3)), links.max(axis=(2, 3)))


def _draws(shape: Sequence[int], seed: int, what: str, step: int) -> Array:
    return np.random.default_rng(derive_key("simulate", seed, what, step)).standard_exponential(tuple(shape))


@dataclass(frozen=True, eq=False)
class Folded:
    """Factors by (pipeline place, group of replicas that are alike)."""

    compute: Array
    links: Array
    groups: tuple[tuple[int, ...], ...]
    """The replicas of each group."""


def fold(factors: Factors, *, every: bool = False) -> Folded:
    """One column for replicas that are alike; one for each replica when ``every`` is asked for."""
    num_replicas = factors.compute.shape[1]
    if every:
        return Folded(factors.compute, factors.links, tuple((replica,) for replica in range(num_replicas)))
    both = np.concatenate([factors.compute, factors.links])
    _, first, group_of = np.unique(both, axis=1, return_index=True, return_inverse=True)
    members: list[list[int]] = [[] for _ in first]
    for replica, group in enumerate(group_of.reshape(-1).tolist()):
        members[group].append(replica)
    # Groups in the order of their first replica, so that replica 0 is in group 0.
    order = sorted(range(len(first)), key=lambda group: members[group][0])
    columns = [int(first[group]) for group in order]
    return Folded(
        factors.compute[:, columns], factors.links[:, columns], tuple(tuple(members[group]) for group in order)
    )


def ranks_of(plan: Plan, *, place: int, replicas: Sequence[int]) -> list[int]:
    """The ranks of a pipeline place in these replicas, in order."""
    _, dp, cp, tp = shape_of(plan)
    inner = cp * tp
    return [(place * dp + replica) * inner + own for replica in replicas for own in range(inner)]


def place_of(plan: Plan, rank: int) -> tuple[int, int]:
    """Pipeline place and replica of a rank."""
    _, dp, cp, tp = shape_of(plan)
    place, rest = divmod(rank, dp * cp * tp)
    return place, rest // (cp * tp)


def split_sites(conditions: Conditions, plan: Plan, num_sites: int) -> tuple[Conditions, ...]:
    """The conditions of each site, for a plan whose replicas are dealt out to sites, neighbours together.

    What is slow is renumbered as in the plan of one site; every site draws its own slow-downs.

    Raises:
        RequestError: the sites do not divide the replicas.
    """
    pp, dp, cp, tp = shape_of(plan)
    if num_sites < 1 or dp % num_sites:
        raise RequestError(f"{num_sites} sites cannot share {dp} replicas evenly; use a number that divides {dp}")
    check_conditions(conditions, plan)
    own = dp // num_sites
    found: list[list[Slow]] = [[] for _ in range(num_sites)]
    for slow in conditions.slow:
        if slow.axis is None:
            place, replica, context, tensor = (int(at) for at in np.unravel_index(slow.index, (pp, dp, cp, tp)))
            index = np.ravel_multi_index((place, replica % own, context, tensor), (pp, own, cp, tp))
            found[replica // own].append(replace(slow, index=int(index)))
        elif slow.axis is Axis.DATA:
            found[slow.index // own].append(replace(slow, index=slow.index % own))
        else:
            for site in found:
                site.append(slow)
    return tuple(
        replace(conditions, slow=tuple(site), seed=derive_key("site", conditions.seed, number))
        for number, site in enumerate(found)
    )


def split_islands(conditions: Conditions, plan: Plan) -> tuple[Conditions, ...]:
    """The conditions of each island of a plan: islands are the outermost axis, so their ranks follow each other.

    What is slow is renumbered as in the plan of one island; every island draws its own slow-downs.
    """
    check_conditions(conditions, plan)
    inside = plan.world_size // plan.islands
    found: list[list[Slow]] = [[] for _ in range(plan.islands)]
    for slow in conditions.slow:
        if slow.axis is None:
            found[slow.index // inside].append(replace(slow, index=slow.index % inside))
        elif slow.axis is Axis.ISLAND:
            found[slow.index].append(replace(slow, index=0))
        else:
            for island in found:
                island.append(slow)
    return tuple(
        replace(conditions, slow=tuple(island), seed=derive_key("site", conditions.seed, number))
        for number, island in enumerate(found)
    )


ASYNCHRONOUS_STEPS = 4
"""Steps that are played of a schedule without a flush: the third has others before and behind it, and stands for all."""
MOST_CELLS = 200_000
"""Cells of a schedule. Each takes about 0.15 ms: building it, its order, and playing it."""
_MOST_WORK = 1e9
"""Cells times replicas times steps, at about 10 ns each where numpy plays them."""
_STEP_WORK = 1e4
"""What a step with draws of its own costs beside its cells, in cells: generators and the ends."""
_CELL_WORK = 1e4
"""What a cell costs, in cells that numpy plays, where Python plays step by step: an asynchronous schedule."""
_STEADY_WORK = 1e3
"""What a step costs that is like the first."""


def check_cells(plan: Plan, microbatches: int) -> None:
    """Refuse a schedule that has too many cells to be played.

    Args:
        plan: how the pipeline is laid out.
        microbatches: of a replica and step.

    Raises:
        RequestError: says how many microbatches can be played.
    """
    each = count_cells(plan, 1)
    if each * microbatches > MOST_CELLS:
        most = max(1, MOST_CELLS // each)
        raise RequestError(
            f"{microbatches} microbatches over {max(1, plan.num_stages)} stage(s) are {each * microbatches} cells to play, and "
            f"{MOST_CELLS} are played at most; give {most} microbatches or fewer: a lower --global-batch, a larger "
            f"train.micro_batch, or microbatches={most} in the plan"
        )


def check_steps(
    plan: Plan, microbatches: int, conditions: Conditions, *, num_steps: int, num_sites: int = 1, option: str
) -> None:
    """Refuse more steps than can be played in a while.

    Args:
        plan: of one site.
        microbatches: of a replica and step.
        conditions: what makes steps unlike.
        num_steps: that are asked for.
        num_sites: that are played.
        option: the word on the command line that says them.

    Raises:
        RequestError: says the largest number that is taken.
    """
    most = most_steps(plan, microbatches, conditions, num_sites=num_sites)
    if num_steps > most:
        draws = " with draws of their own (--jitter, --link-jitter)" if conditions.varies else ""
        raise RequestError(
            f"{option} is {num_steps}, and of this plan {most} steps{draws} are played at most; give {option} {most} or fewer"
        )


def most_steps(plan: Plan, microbatches: int, conditions: Conditions, *, num_sites: int = 1) -> int:
    """Steps that are played at most, 1 or more."""
    cells = count_cells(plan, microbatches)
    if not conditions.varies:
        work = _STEADY_WORK
    elif _is_asynchronous(plan):
        work = cells * _CELL_WORK
    else:
        work = cells * plan.degree(Axis.DATA) + plan.world_size + _STEP_WORK
    return max(1, int(_MOST_WORK / (work * num_sites)))


def count_cells(plan: Plan, microbatches: int) -> int:
    """Cells that are played of a plan: a forward and a backward pass of each microbatch in each stage; halves count once."""
    return 2 * max(1, plan.num_stages) * microbatches * (ASYNCHRONOUS_STEPS if _is_asynchronous(plan) else 1)


def _is_asynchronous(plan: Plan) -> bool:
    return plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous
