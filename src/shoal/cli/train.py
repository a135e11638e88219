"""``shoal train``: run a recipe, on this machine's processes or as one rank of a launcher's."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from shoal.cli.clusters.on import Nodes, On, PerNode, be_launched, start_elsewhere
from shoal.cli.console import JsonFile, Overrides, check_result_file, write_result
from shoal.cli.options.hosts import Hostfile, Hosts, Network, Python, Shell, build_fleet, check_options, read_hosts
from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.core.place import Place
    from shoal.core.plan import Plan
    from shoal.data.check import DataSummary
    from shoal.data.spec import DataSpec
    from shoal.launch.hosts.hostspec import HostSlots
    from shoal.trainer.config import Recipe
    from shoal.trainer.launch import RunJob
    from shoal.trainer.own_parts import OwnPartsHere
    from shoal.trainer.request import Prepared, TrainRequest

_Recipe = Annotated[Path | None, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
_Plan = Annotated[
    str | None, typer.Option("--plan", metavar="TEXT", help="Lay the run out like this, such as 'dp=2'; auto picks.")
]
_Processes = Annotated[int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes to start.")]
_RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the run leaves everything.")]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the newest whole checkpoint of the run directory, which must exist; --resume=auto starts a run where it "
        "does not.",
    ),
]
_ResumeAuto = Annotated[bool, typer.Option("--resume-auto", hidden=True, help="What --resume=auto is read as.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print plan, shapes and bytes per rank, and start nothing.")]
_Restarts = Annotated[
    int | None, typer.Option("--max-restarts", metavar="N", min=0, help="Restart dead ranks this many times.")
]
_Profile = Annotated[str | None, typer.Option("--profile", metavar="A:B", help="Trace steps A to B-1 for Perfetto.")]
_Forecast = Annotated[
    bool, typer.Option("--forecast", help="Predict the step beforehand and compare at the end, as with --plan auto.")
]
_FindRate = Annotated[
    bool,
    typer.Option(
        "--find-rate", help="Print losses at learning rates that grow, and the rate to begin with; train nothing."
    ),
]
_Follow = Annotated[
    bool,
    typer.Option("--follow", help="Never end: take in what is appended to the store, and publish the model meanwhile."),
]
_HelpRecipe = Annotated[bool, typer.Option("--help-recipe", help="Print every key of a recipe with its default.")]
_Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a recipe, for editors.")]
_NO_AUTO = (
    "plan 'auto' is picked for this machine, and a launcher has started the ranks already, or other hosts run them; name a plan "
    "(`shoal tune RECIPE` says which is fastest)"
)


class TrainCommand(TyperCommand):
    """Reads ``--resume=auto``. An option that may have a value or none would take the recipe that follows it for its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, as click reads them."""
        end = args.index("--") if "--" in args else len(args)
        for argument in args[:end]:
            if argument.startswith("--resume=") and argument != "--resume=auto":
                raise RequestError(f"{argument}: give --resume alone to go on, or --resume=auto to go on or start")
        return super().parse_args(
            ctx, ["--resume-auto" if one == "--resume=auto" else one for one in args[:end]] + args[end:]
        )


def train(
    context: typer.Context,
    recipe: _Recipe = None,
    plan: _Plan = None,
    nproc: _Processes = None,
    overrides: Overrides = None,
    run_dir: _RunDir = None,
    resume: _Resume = False,
    resume_auto: _ResumeAuto = False,
    dry_run: _DryRun = False,
    max_restarts: _Restarts = None,
    profile: _Profile = None,
    forecast: _Forecast = False,
    find_rate: _FindRate = False,
    follow: _Follow = False,
    on: On = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    ssh: Shell = None,
    python: Python = None,
    network: Network = None,
    help_recipe: _HelpRecipe = False,
    schema: _Schema = False,
    json_file: JsonFile = None,
) -> None:
    """Train the model of RECIPE."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.launch.environments import read_place
    from shoal.trainer.request import TrainRequest, prepare

    if help_recipe or schema:
        _explain_recipe(schema=schema, json_file=json_file)
        return
    recipe = _named_recipe(recipe)
    check_result_file(json_file)
    resume = resume or resume_auto
    changes = _changes(recipe, overrides, max_restarts, profile, follow=follow)
    request = TrainRequest(
        recipe=recipe, plan=plan, overrides=tuple(changes), run_dir=run_dir, resume=resume, may_start=resume_auto
    )
    is_odd = dry_run or find_rate or forecast or nproc is not None
    start_elsewhere(request, on, nodes=nodes, per_node=per_node, hosts=hosts, json_file=json_file, is_odd=is_odd)
    launched = (place := read_place(os.environ)).is_launched
    _refuse_search(find_rate, resume=resume, dry_run=dry_run, launched=launched)
    _wait_quietly(launched)
    named = read_hosts(hosts, hostfile)
    _refuse_hosts(named, place, nproc=nproc, find_rate=find_rate, ssh=ssh, python=python, network=network)
    _check_processes(None if launched or dry_run or named else nproc)
    from shoal.tuning.plan_choice import asks_auto, choose_for_run, forecast_plan

    own, forecast_page = OwnParts(is_dry=dry_run), None
    if asks_auto(recipe, plan, changes):
        required = run_dir if resume and not resume_auto else None
        try_before_search(recipe, changes, launched=launched or bool(named), own=own, required=required)
        plan, forecast_page = choose_for_run(
            recipe, overrides=changes, num_processes=nproc, run_dir=run_dir, resume=resume
        )
        nproc = None
    num_processes = place.world_size if launched else sum(host.slots for host in named) or nproc
    here = place.local_size or 1 if launched or named else None  # of other hosts' ranks each looks at its own
    request = replace(request, plan=plan, num_processes=num_processes, has_hosts=bool(named), ranks_here=here)
    if launched and not dry_run:
        be_launched(request, place, json_file)
    if launched and place.rank > 0:
        return  # a dry run is described once
    if find_rate:
        _find_rate(request, own, json_file, debug=context.obj["debug"])
    prepared = prepare(request, own=own)
    # The ranks build their own data; a copy that nobody reads would stay in memory as long as they train.
    del own
    if dry_run:
        _describe_only(prepared, json_file)
        return
    if forecast and forecast_page is None and not resume:
        forecast_page = forecast_plan(prepared.recipe, prepared.setup.plan)
    shell = {"ssh": ssh, "python": python, "network": network}
    run_job = _job_on_hosts(prepared, named, hostfile, debug=context.obj["debug"], **shell) if named else None
    _run(prepared, forecast_page, json_file, run_job, debug=context.obj["debug"])


def _wait_quietly(launched: bool) -> None:
    """Before torch loads: threads that spin while they wait make steps thirty times slower where a core is wanted twice."""
    if launched:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _named_recipe(recipe: Path | None) -> Path:
    if recipe is None:
        raise RequestError(
            "which recipe? give a TOML file, such as recipes/tiny.toml, or make one with `shoal init DIR`"
        )
    return recipe


def _job_on_hosts(
    prepared: "Prepared",
    hosts: "tuple[HostSlots, ...]",
    hostfile: Path | None,
    *,
    ssh: str | None,
    python: str | None,
    network: str | None,
    debug: bool,
) -> "RunJob":
    """What runs a prepared request on several hosts."""
    from functools import partial

    from shoal.engine.resolve import MOST_PER_CORE
    from shoal.launch.hosts.generation import supervise_hosts
    from shoal.launch.hosts.hostspec import describe_hosts, hosts_behind, place_ranks
    from shoal.serverrun.limits import HOST_RANK, refuse_server_hosts
    from shoal.trainer.elastic.limits import refuse_elastic_hosts
    from shoal.trainer.elastic.membership import ranks_at_start
    from shoal.trainer.launch import WORKER, supervise_ranks

    plan, elastic = prepared.setup.plan, prepared.recipe.elastic
    at_start = ranks_at_start(elastic, plan)
    placed = place_ranks(hosts, at_start, has_more=elastic.starts_more)
    if elastic.mode == "shrink":
        refuse_elastic_hosts(prepared.recipe, plan, placed)
    module = WORKER
    if plan.ps:
        refuse_server_hosts(plan)
        module = HOST_RANK
    fleet = build_fleet(placed, remote=ssh, python=python, network=network, most_per_core=MOST_PER_CORE)
    if elastic.starts_more:
        fleet = replace(fleet, optional=hosts_behind(placed, at_start), hostfile=hostfile)
    where = describe_hosts(placed)
    start = partial(supervise_hosts, fleet=fleet)
    return partial(supervise_ranks, debug=debug, supervise_with=start, where=where, module=module)


def _refuse_hosts(
    hosts: "tuple[HostSlots, ...]", place: "Place", *, nproc: int | None, find_rate: bool, **others: str | None
) -> None:
    """Refuse options that do not go with hosts, or not without."""
    if hosts and place.is_launched:
        raise RequestError(
            f"--hosts starts the ranks, and {place.launcher} has started this one already ({', '.join(place.evidence)}); "
            "leave --hosts out, or start the command by itself"
        )
    check_options(hosts, nproc=nproc, **others)
    if hosts and find_rate:
        raise RequestError("--find-rate tries rates on this machine; leave --hosts out")


def _run(
    prepared: "Prepared",
    forecast_page: dict[str, Any] | None,
    json_file: Path | None,
    run_job: "RunJob | None" = None,
    *,
    debug: bool,
) -> None:
    from shoal.trainer.launch import train_supervised
    from shoal.trainer.summary import describe_summary

    if prepared.setup.plan.ps and run_job is None:
        from shoal.serverrun.job.run import train_with_servers

        run_job = train_with_servers
    ended = train_supervised(prepared, debug=debug, forecast=forecast_page, run_job=run_job)
    if ended.was_orderly:
        print(describe_summary(ended.summary, prepared.run_dir))
    write_result(json_file, ended.summary)
    raise typer.Exit(ended.exit_code)


def _refuse_search(is_asked: bool, *, resume: bool, dry_run: bool, launched: bool) -> None:
    if is_asked and (resume or dry_run):
        raise RequestError("--find-rate tries rates on the first weights of a recipe; leave --resume and --dry-run out")
    if is_asked and launched:
        raise RequestError("--find-rate starts its own processes, and a launcher has started these; run it by itself")


def _find_rate(request: "TrainRequest", own: "OwnParts", json_file: Path | None, *, debug: bool) -> NoReturn:
    import tempfile
    from dataclasses import replace
    from functools import partial

    from shoal.cli.console import print_table
    from shoal.trainer.launch import supervise_ranks, train_supervised
    from shoal.trainer.ratesearch.table import FIND_RATE, describe_search, refuse_search, result_of
    from shoal.trainer.request import prepare

    with tempfile.TemporaryDirectory(prefix="shoal-rate-") as folder:
        prepared = prepare(replace(request, run_dir=Path(folder) / "search"), own=own)
        refuse_search(prepared.setup.plan)
        job = partial(supervise_ranks, debug=debug, arguments=[FIND_RATE])
        ended = train_supervised(prepared, debug=debug, run_job=job)
    if "rate_search" not in ended.summary:
        raise typer.Exit(ended.exit_code)
    result = result_of(ended.summary)
    rows, sentence = describe_search(result, prepared.recipe.optim.lr)
    print_table(("rate", "loss"), rows)
    print(sentence)
    write_result(json_file, result)
    raise typer.Exit(ended.exit_code)


def _describe_only(prepared: "Prepared", json_file: Path | None) -> None:
    from shoal.trainer.dryrun import describe_dry_run, dry_run_result

    result = dry_run_result(prepared)
    print(describe_dry_run(result))
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    write_result(json_file, result)


def _changes(
    recipe: Path, overrides: list[str] | None, max_restarts: int | None, profile: str | None, *, follow: bool
) -> list[str]:
    """What the options change in the recipe."""
    changes = list(overrides or ())
    if max_restarts is not None:
        changes.append(f"elastic.max_restarts={max_restarts}")
    if profile is not None:
        changes.append(f'telemetry.profile="{profile}"')
    if follow:
        from shoal.core.config import apply_overrides, read_toml
        from shoal.trainer.online.follow import follow_overrides

        changes += follow_overrides(apply_overrides(read_toml(recipe), changes))
    return changes


def _check_processes(count: int | None) -> None:
    """Said before the recipe's batch is held to so many: the batch that they would need is no answer."""
    from shoal.engine.resolve import check_processes

    if count is not None:
        check_processes(count)


def try_before_search(
    recipe: Path,
    changes: Sequence[str],
    *,
    launched: bool = False,
    own: "OwnParts | None" = None,
    required: Path | None = None,
) -> None:
    """Refuse what no plan can run, ranks that are there already, and a missing run directory, before plans are tried."""
    if launched:
        raise RequestError(_NO_AUTO)
    from shoal.core.plan import Plan
    from shoal.trainer.claim import require_run_dir
    from shoal.trainer.config import load_recipe
    from shoal.trainer.request import try_own_parts

    if required is not None:
        require_run_dir(required)
    try_own_parts(load_recipe(recipe, changes), Plan(dp=1), own=own or OwnParts())


class OwnParts:
    """Builds the user's own data and module when it is asked to, and imports torch only then."""

    def __init__(self, *, is_dry: bool = False) -> None:
        self._is_dry = is_dry

    @cached_property
    def _parts(self) -> "OwnPartsHere":
        from shoal.trainer.own_parts import OwnPartsHere

        return OwnPartsHere()

    def measure_data(self, recipe: "Recipe") -> "DataSummary":
        """See ``shoal.trainer.request.OwnParts``."""
        return self._parts.measure_data(recipe)

    def check_same_data(self, recipe: "Recipe", checkpoints: Path) -> None:
        """See ``shoal.trainer.request.OwnParts``."""
        self._parts.check_same_data(recipe, checkpoints)

    def check_optimizer(self, recipe: "Recipe") -> None:
        """See ``shoal.trainer.request.OwnParts``."""
        self._parts.check_optimizer(recipe)

    def check_callbacks(self, recipe: "Recipe") -> None:
        """See ``shoal.trainer.request.OwnParts``."""
        self._parts.check_callbacks(recipe)

    def check_weights(self, recipe: "Recipe", spec: "DataSpec") -> None:
        """See ``shoal.trainer.request.OwnParts``."""
        self._parts.check_weights(recipe, spec)

    def check_plan(self, recipe: "Recipe", plan: "Plan") -> None:
        """See ``shoal.trainer.request.OwnParts``."""
        self._parts.check_plan(recipe, plan)

    def check_fragments(self, recipe: "Recipe", spec: "DataSpec", plan: "Plan") -> None:
        """See ``shoal.trainer.request.OwnParts``."""
        self._parts.check_fragments(recipe, spec, plan)

    def try_parts(self, recipe: "Recipe", plan: "Plan") -> tuple[str, ...]:
        """See ``shoal.trainer.request.OwnParts``. A model that does not fit this machine can be described, and not tried."""
        if self._is_dry:
            return ()
        return self._parts.try_parts(recipe, plan)


def _explain_recipe(*, schema: bool, json_file: Path | None) -> None:
    import json

    from shoal.trainer.config import Recipe, describe_recipe

    if schema:
        print(json.dumps(Recipe.model_json_schema(), indent=2))
    else:
        print(describe_recipe())
    write_result(json_file, Recipe.model_json_schema())
