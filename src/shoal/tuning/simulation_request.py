"""What ``shoal simulate`` asks for: the recipe, the plan and the batch of a simulation, checked and derived. No torch.

A recipe's batch is made for the processes that train it, and a simulation has as many devices as somebody asks for: it is the
recipe's, or the next one that the plan's replicas and microbatches can share out. A batch that the user gives is held to the
plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE
from shoal.core.plan import Plan
from shoal.core.units import divisors
from shoal.data.check import check_data
from shoal.data.spec import DataSpec
from shoal.engine.config import TrainConfig
from shoal.engine.resolve import choose_plan, resolve_plan
from shoal.models.check import check_model, facts_of
from shoal.planner.hardware.clusters import read_cluster
from shoal.planner.hardware.devices import Cluster
from shoal.planner.pricing.job import MOST_SAMPLES, check_batch
from shoal.planner.simulation.conditions import (
    MOST_CELLS,
    Conditions,
    check_cells,
    check_conditions,
    check_steps,
    count_cells,
    parse_slow,
)
from shoal.planner.simulation.goodput import Failures, best_interval
from shoal.planner.simulation.local_sgd import find_link
from shoal.schedules.catalogue import fitting_microbatches
from shoal.trainer.config import Recipe, RecipeLike, read_recipe
from shoal.trainer.request import OwnParts, refuse_settings


def is_batch_given(overrides: Sequence[str]) -> bool:
    """Whether the command line says the batch."""
    return any(override.partition("=")[0].strip() == "train.global_batch" for override in overrides)


def share_batch(recipe: Recipe, plan: Plan, *, is_given: bool) -> tuple[Recipe, str | None]:
    """The recipe with a batch that its plan can share out, and what to say about it where that is not the recipe's.

    Args:
        recipe: what is simulated.
        plan: how; its replicas are said.
        is_given: somebody asks for this very batch.

    Raises:
        RequestError: the batch is asked for and cannot be shared out, or the one that can be is too large.
    """
    train = recipe.train
    if is_given:
        _check_batch(train.global_batch, plan)
        return recipe, None
    replicas = plan.degree(Axis.DATA)
    if train.global_batch % (replicas * (plan.microbatches or 1) * (train.micro_batch or 1)) == 0:
        return recipe, None
    batch = fitting_batch(train, plan)
    if batch > MOST_SAMPLES:
        raise RequestError(
            f"plan {str(plan)!r}: its {replicas} replicas need a global batch of {batch} for their microbatches, and "
            f"{MOST_SAMPLES} is the most; give fewer microbatches, a smaller train.micro_batch, or fewer --devices"
        )
    found = recipe.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})
    return found, (
        f"the recipe's global batch of {train.global_batch} cannot be shared out over {_sharers(train, plan)}: {batch} is "
        f"simulated; --global-batch says another"
    )


def fitting_batch(train: TrainConfig, plan: Plan) -> int:
    """The smallest batch, from the recipe's own on, in which every replica has whole microbatches, as many as fill a pipeline."""
    replicas = plan.num_shares
    each = replicas * (plan.microbatches or _filling(plan)) * (train.micro_batch or 1)
    if plan.microbatches is not None and train.micro_batch is not None:
        # Both numbers are said, and their product is the share of a replica: no multiple of it would be.
        return each
    return each * max(1, -(-train.global_batch // each))


def named_microbatches(train: TrainConfig, plan: Plan) -> int:
    """Those that the plan or the recipe names, before a schedule is made of them; what is derived is few."""
    share = train.global_batch // plan.num_shares
    if plan.microbatches is not None:
        return min(plan.microbatches, share)
    return max(1, share // train.micro_batch) if train.micro_batch is not None else 1


def _filling(plan: Plan) -> int:
    """Microbatches of a replica where nobody says; one where a schedule that is full has too many cells to be played."""
    if plan.pp == 1 or count_cells(plan, 4 * plan.pp) > MOST_CELLS:
        return 1
    name = plan.schedule or DEFAULT_SCHEDULE
    return fitting_microbatches(name, ranks=plan.pp, samples=None, chunks=plan.chunks, replicas=plan.stage_replicas)


def _sharers(train: TrainConfig, plan: Plan) -> str:
    words = [f"{plan.num_shares} replica(s)"]
    if plan.microbatches is not None:
        words.append(f"{plan.microbatches} microbatch(es)")
    if train.micro_batch is not None:
        words.append(f"{train.micro_batch} sample(s) each")
    return " x ".join(words)


def _check_batch(batch: int, plan: Plan) -> None:
    """Refuse a batch that the replicas cannot share out, in the options of a simulation: its devices are as easily changed.

    Raises:
        RequestError: both numbers, the nearest batches, and the most devices that this batch is enough for.
    """
    replicas = plan.num_shares
    if batch % replicas == 0:
        return
    smaller = batch - batch % replicas
    enough = max(one for one in divisors(batch) if one <= replicas)
    batches = " or ".join(str(size) for size in (smaller, smaller + replicas) if size)
    raise RequestError(
        f"plan {str(plan)!r}: a global batch of {batch} cannot be shared out evenly over its {replicas} replicas; give "
        f"--global-batch {batches}, or dp={enough} on --devices {enough * plan.ranks_per_replica}"
    )


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """What the user asked for, as given."""

    recipe: RecipeLike
    cluster: str
    plan: str | None = None
    num_devices: int | None = None
    """In place of the cluster's own number."""
    overrides: tuple[str, ...] = ()
    num_sites: int | None = None
    """Sites that average seldom; each replica is one when ``is_local`` and this is left out."""
    is_local: bool = False
    """Sites average by ``--local-steps``, whatever the plan's ``sync``, which must be all-reduce then."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was checked."""

    recipe: Recipe
    plan: Plan
    """Of the whole cluster, everything derived."""
    micro_batch: int
    cluster: Cluster
    """The devices that the plan uses."""
    spec: DataSpec
    num_sites: int
    """Sites of ``--local-steps``, or the plan's islands."""
    warnings: tuple[str, ...]
    derived: str | None = None
    """Says that the batch is not the recipe's, where it is not."""

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all sites."""
        return self.recipe.train.global_batch

    @property
    def site_plan(self) -> Plan:
        """The plan of one site; the whole plan where there is one site."""
        if self.num_sites == 1:
            return self.plan
        if self.plan.islands > 1:
            return replace(self.plan, islands=1, sync="allreduce", compress=None)
        own = self.plan.degree(Axis.DATA) // self.num_sites
        return replace(self.plan, dp=own, zero=self.plan.zero if own > 1 else 0)

    @property
    def site_cluster(self) -> Cluster:
        """The devices of one site."""
        return self.cluster if self.num_sites == 1 else self.cluster.resized(self.site_plan.world_size)


def read_simulation(request: SimulationRequest, *, own: OwnParts) -> Asked:
    """Check a request and derive what it left open.

    Args:
        request: what the user asked for.
        own: measures the user's own data where the recipe names it.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    recipe = read_recipe(request.recipe, request.overrides)
    check_batch(recipe.train.global_batch)
    cluster = read_cluster(request.cluster, recipe.planner.devices)
    if request.num_devices is not None:
        if request.num_devices < 1:
            raise RequestError(f"--devices is {request.num_devices}; give 1 or more")
        cluster = cluster.resized(request.num_devices)
    plan = _fit_plan(recipe, request.plan, cluster)
    recipe, derived = share_batch(recipe, plan, is_given=is_batch_given(request.overrides))
    check_cells(plan, named_microbatches(recipe.train, plan))
    layout = resolve_plan(recipe.train, plan)
    data = check_data(recipe.data)
    if data.spec is None:
        data = own.measure_data(recipe)
    assert data.spec is not None, "data that was measured has a spec"
    check_model(recipe.model, data.spec)
    refuse_settings(recipe, plan)
    # Of a shape, and of the user's own module, ``simulation.py`` asks: it has looked at them without memory.
    facts = facts_of(recipe.model, data.spec) if recipe.planner.shape is None else None
    if facts is not None:
        replace(layout.plan, ep=1).check(facts)
    num_sites = _sites(request, layout.plan)
    warnings = [*cluster.warnings]
    if layout.plan.world_size < cluster.num_devices:
        warnings.append(f"the plan uses {layout.plan.world_size} of the cluster's {cluster.num_devices} devices")
    if request.is_local and layout.plan.zero and layout.plan.degree(Axis.DATA) == num_sites:
        warnings.append(f"zero={layout.plan.zero} has nothing to shard in a site with one replica, and is left out")
    return Asked(
        recipe=recipe.model_copy(update={"plan": str(layout.plan)}),
        plan=layout.plan,
        micro_batch=layout.micro_batch,
        cluster=cluster if layout.plan.world_size == cluster.num_devices else cluster.resized(layout.plan.world_size),
        spec=data.spec,
        num_sites=num_sites,
        warnings=tuple(warnings),
        derived=derived,
    )


def _fit_plan(recipe: Recipe, text: str | None, cluster: Cluster) -> Plan:
    """The plan for a cluster: ``dp`` takes up its devices where it is left open.

    Raises:
        RequestError: the plan cannot run, or the cluster is too small for it.
    """
    wanted = Plan.parse(recipe.plan if text is None else text) if (text or recipe.plan).strip() != "auto" else Plan()
    if wanted.ps:
        raise RequestError(
            f"plan {str(wanted)!r}: parameter servers (ps={wanted.ps}) are not simulated; give a plan with dp in their place"
        )
    num_devices = cluster.num_devices
    if wanted.dp is not None and text is not None:
        if wanted.world_size > num_devices:
            raise RequestError(
                f"plan {str(wanted)!r} needs {wanted.world_size} devices, and the cluster has {num_devices}; "
                f"give a cluster of {wanted.world_size}, or lower a degree of the plan"
            )
        return _chosen(recipe, text, wanted, None)
    per_replica = wanted.ranks_per_replica * wanted.islands
    if per_replica and num_devices % per_replica:
        fits = [size for size in (num_devices - num_devices % per_replica,) if size]
        fits.append(num_devices - num_devices % per_replica + per_replica)
        raise RequestError(
            f"plan {str(wanted)!r}: the cluster's {num_devices} devices are not a multiple of the {per_replica} that one replica "
            f"{'of each island ' if wanted.islands > 1 else ''}takes; use --devices {' or '.join(map(str, fits))}, or say dp in "
            f"the plan"
        )
    if text is not None and wanted.ep > 1:
        # Said here: what is left of a plan that names nothing but ep would read as one replica.
        wanted = replace(wanted, dp=num_devices // per_replica)
    return _chosen(recipe, text, wanted, num_devices)


def _chosen(recipe: Recipe, text: str | None, wanted: Plan, num_devices: int | None) -> Plan:
    """The plan as a run would choose it, with the expert parallelism that is priced before it is executed."""
    without = None if text is None else str(replace(wanted, ep=1))
    own = recipe.plan if recipe.plan.strip() == "auto" else str(replace(Plan.parse(recipe.plan), ep=1))
    return replace(choose_plan(own, plan_text=without, num_processes=num_devices), ep=wanted.ep)


def _sites(request: SimulationRequest, plan: Plan) -> int:
    if not request.is_local:
        if request.num_sites is not None:
            raise RequestError(f"--sites {request.num_sites} is of sites that average seldom; give --local-steps too")
        return plan.islands
    if plan.islands > 1:
        raise RequestError(
            f"plan {str(plan)!r} has islands that agree by sync={plan.sync}, and --local-steps is another way; leave one of "
            f"them out"
        )
    replicas = plan.degree(Axis.DATA)
    found = replicas if request.num_sites is None else request.num_sites
    if found < 1 or replicas % found:
        raise RequestError(
            f"--sites {found} does not divide the {replicas} replicas of plan {str(plan)!r}; use a number that divides {replicas}"
        )
    if found == 1:
        raise RequestError(
            f"plan {str(plan)!r} has {replicas} replica(s) in one site, and --local-steps needs two sites to average; raise dp"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """The options ``--mtbf``, ``--restart``, ``--checkpoint``, ``--interval`` and ``--days``."""

    hours: float
    restart: float
    checkpoint: float
    interval: str
    days: float

    def check(self) -> None:
        """Refuse what cannot be, before anything is priced.

        Raises:
            RequestError: one message with the number and the fix.
        """
        if not 0 < self.hours < math.inf:
            raise RequestError(
                f"--mtbf is {self.hours:g} hours; give hours above 0, such as 50000, or leave --mtbf out where nothing fails"
            )
        for option, seconds in (("--restart", self.restart), ("--checkpoint", self.checkpoint)):
            if not 0 <= seconds < math.inf:
                raise RequestError(f"{option} is {seconds:g} seconds; give 0 or more")
        if not 0 < self.days <= 36_500:
            raise RequestError(f"--days is {self.days:g}; give days above 0, and 36500 at most")
        if self.interval != "auto" and not (self.interval.isdecimal() and int(self.interval) >= 1):
            raise RequestError(f"--interval is {self.interval!r}; give a number of steps, 1 or more, or auto")

    def of(self, num_devices: int) -> Failures:
        """The failures of so many devices."""
        return Failures(
            device_mtbf=self.hours * 3600.0, num_devices=num_devices, restart=self.restart, checkpoint=self.checkpoint
        )

    def steps_between(self, step_seconds: float, num_devices: int) -> int:
        """Steps between checkpoints, by Young's rule where the option is ``auto``."""
        return best_interval(step_seconds, self.of(num_devices)) if self.interval == "auto" else int(self.interval)


def check_num_steps(asked: Asked, conditions: Conditions, *, num_steps: int | None, local_steps: int | None) -> None:
    """Refuse what would be played for ever, before the model is traced."""
    plan, count = asked.site_plan, asked.plan.microbatches or 1
    if num_steps is not None:
        check_steps(plan, count, conditions, num_steps=num_steps, num_sites=asked.num_sites, option="--steps")
    if local_steps is not None:
        check_steps(plan, count, conditions, num_steps=local_steps, num_sites=asked.num_sites, option="--local-steps")


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How a plan is played: what is slow, what fails, and how sites average. The names are those of ``shoal simulate``."""

    steps: int | None = None
    """Steps to play; as many as differ when left out."""
    straggler: Sequence[str] = ()
    """Ranks that take longer, each as ``RANK:FACTOR``."""
    slow: Sequence[str] = ()
    """All ranks with one index along an axis, each as ``AXIS=INDEX:FACTOR``."""
    jitter: float = 0.0
    """Mean slow-down of a rank in a step."""
    link_jitter: float = 0.0
    """The same of a rank's links."""
    seed: int = 0
    """Of everything that is drawn."""
    mtbf: float | None = None
    """Mean hours between failures of one device; None where nothing fails."""
    restart: float = 300.0
    """Seconds from a failure until training goes on."""
    checkpoint: float = 30.0
    """Seconds that a checkpoint stalls training."""
    interval: str = "auto"
    """Steps between checkpoints."""
    days: float = 30.0
    """Days of work to play failures over."""
    local_steps: int | None = None
    """Sites average every so many steps only."""
    wan: str = "wan-100m"
    """Between sites: a link's name, or such as ``1Gbit/s,30ms``."""
    compression: float = 1.0
    """Times fewer bytes between sites."""

    @property
    def conditions(self) -> Conditions:
        """What is slow."""
        return Conditions(
            slow=tuple(parse_slow(text) for text in (*self.straggler, *self.slow)),
            jitter=self.jitter,
            link_jitter=self.link_jitter,
            seed=self.seed,
        )

    @property
    def failing(self) -> FailureOptions | None:
        """What fails; None where nothing does."""
        if self.mtbf is None:
            return None
        return FailureOptions(
            hours=self.mtbf, restart=self.restart, checkpoint=self.checkpoint, interval=self.interval, days=self.days
        )


def check_simulation(request: SimulationRequest, options: SimulationOptions, *, own: OwnParts) -> Asked:
    """Check everything that is asked of a simulation, and derive what was left open.

    Args:
        request: the recipe, the plan and the cluster.
        options: how it is played.
        own: measures the user's own data where the recipe names it.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    conditions = options.conditions
    find_link(options.wan)
    if options.failing is not None:
        options.failing.check()
    asked = read_simulation(request, own=own)
    check_conditions(conditions, asked.plan)
    check_num_steps(asked, conditions, num_steps=options.steps, local_steps=options.local_steps)
    return asked
