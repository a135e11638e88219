"""The front door of a simulation: a recipe, a plan and a cluster, checked against each other before anything is priced. No torch.

Unlike a run's, it asks nothing of the data but its shapes: ten thousand replicas may be simulated on a file that feeds two.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.data.check import check_data
from shoal.data.spec import DataSpec
from shoal.engine.resolve import choose_plan, resolve_plan
from shoal.models.check import check_model, facts_of
from shoal.planner.clusters import read_cluster
from shoal.planner.hardware import Cluster
from shoal.planner.job import check_batch
from shoal.planner.simulation.bounds import check_cells
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.request import OwnParts, refuse_settings
from shoal.tuning.simbatch import is_batch_given, named_microbatches, share_batch


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """What the user asked for, as given."""

    recipe: Path
    cluster: str
    plan: str | None = None
    num_devices: int | None = None
    """In place of the cluster's own number."""
    overrides: tuple[str, ...] = ()
    num_sites: int | None = None
    """Sites that average seldom; each replica is one when ``is_local`` and this is left out."""
    is_local: bool = False


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
    remarks: tuple[str, ...]
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
    recipe = load_recipe(request.recipe, request.overrides)
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
    # Of a shape, and of the user's own module, ``simprice.py`` asks: it has looked at them without memory.
    facts = facts_of(recipe.model, data.spec) if recipe.planner.shape is None else None
    if facts is not None:
        replace(layout.plan, ep=1).check(facts)
    num_sites = _sites(request, layout.plan)
    remarks = [*cluster.remarks]
    if layout.plan.world_size < cluster.num_devices:
        remarks.append(f"the plan uses {layout.plan.world_size} of the cluster's {cluster.num_devices} devices")
    if num_sites > 1 and layout.plan.zero and layout.plan.degree(Axis.DATA) == num_sites:
        remarks.append(f"zero={layout.plan.zero} has nothing to shard in a site with one replica, and is left out")
    return Asked(
        recipe=recipe.model_copy(update={"plan": str(layout.plan)}),
        plan=layout.plan,
        micro_batch=layout.micro_batch,
        cluster=cluster if layout.plan.world_size == cluster.num_devices else cluster.resized(layout.plan.world_size),
        spec=data.spec,
        num_sites=num_sites,
        remarks=tuple(remarks),
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
    per_replica = wanted.ranks_per_replica
    if per_replica and num_devices % per_replica:
        fits = [size for size in (num_devices - num_devices % per_replica,) if size]
        fits.append(num_devices - num_devices % per_replica + per_replica)
        raise RequestError(
            f"plan {str(wanted)!r}: the cluster's {num_devices} devices are not a multiple of the {per_replica} that one replica "
            f"takes; use --devices {' or '.join(map(str, fits))}, or say dp in the plan"
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
        return 1
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
