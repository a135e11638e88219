"""``shoal simulate``: play a plan on a cluster without it: step time, bubble, memory, timeline, goodput."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.result import STDOUT, JsonFile, check_folder, check_result_file, write_result
from shoal.core.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.planner.simulation.conditions import Conditions
    from shoal.planner.simulation.goodput import Failures, Goodput
    from shoal.planner.simulation.result import Simulated
    from shoal.tuning.simulation import Priced
    from shoal.tuning.simulation_request import Asked

    Array = NDArray[np.float64]

_DRAWN = 100
"""Steps that are played where they differ and nobody says how many."""
_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
_Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME:NODESxDEVICES[@LINK]|FILE",
        help="Where, such as a100-80gb:16x8, or a100-80gb:16x8@ethernet-100g.",
    ),
]
_Plan = Annotated[str | None, typer.Option("--plan", metavar="TEXT", help="The plan; the recipe's when left out.")]
_Batch = Annotated[
    int | None,
    typer.Option("--global-batch", metavar="B", help="Samples of a step; the recipe's, or what the plan needs."),
]
_Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Steps to play.")]
_Devices = Annotated[int | None, typer.Option("--devices", metavar="N", help="Devices, in place of the cluster's.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; KEY= unsets it.")
]
_Straggler = Annotated[
    list[str] | None,
    typer.Option("--straggler", metavar="RANK:FACTOR", help="A rank that takes FACTOR times as long; repeatable."),
]
_Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="AXIS=INDEX:FACTOR", help="All ranks with this index along pp, dp, cp or tp."),
]
_Jitter = Annotated[float, typer.Option("--jitter", metavar="SHARE", help="Mean slow-down of a rank in a step.")]
_LinkJitter = Annotated[float, typer.Option("--link-jitter", metavar="SHARE", help="The same of a rank's links.")]
_Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of everything that is drawn.")]
_Mtbf = Annotated[
    float | None, typer.Option("--mtbf", metavar="HOURS", help="Mean time between failures of one device.")
]
_Restart = Annotated[float, typer.Option("--restart", metavar="SECONDS", help="From a failure until training goes on.")]
_Checkpoint = Annotated[
    float, typer.Option("--checkpoint", metavar="SECONDS", help="How long a checkpoint stalls training.")
]
_Interval = Annotated[str, typer.Option("--interval", metavar="STEPS|auto", help="Steps between checkpoints.")]
_Days = Annotated[float, typer.Option("--days", metavar="D", help="Days of work to play failures over.")]
_LocalSteps = Annotated[
    int | None, typer.Option("--local-steps", metavar="H", min=1, help="Sites average every H steps only.")
]
_Wan = Annotated[
    str, typer.Option("--wan", metavar="LINK", help="Between sites: a link's name, or such as 1Gbit/s,30ms.")
]
_Sites = Annotated[int | None, typer.Option("--sites", metavar="K", help="Sites; each replica is one when left out.")]
_Compression = Annotated[float, typer.Option("--compression", metavar="X", help="Times fewer bytes between sites.")]
_Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the step.")]
_Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto.")]
_RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Write the events that a run would.")]
_Expand = Annotated[
    bool, typer.Option("--expand", help="Every rank in the trace and the run, also where many are alike.")
]


def simulate(
    recipe: _Recipe,
    cluster: _Cluster,
    plan: _Plan = None,
    global_batch: _Batch = None,
    steps: _Steps = None,
    devices: _Devices = None,
    overrides: _Set = None,
    straggler: _Straggler = None,
    slow: _Slow = None,
    jitter: _Jitter = 0.0,
    link_jitter: _LinkJitter = 0.0,
    seed: _Seed = 0,
    mtbf: _Mtbf = None,
    restart: _Restart = 300.0,
    checkpoint: _Checkpoint = 30.0,
    interval: _Interval = "auto",
    days: _Days = 30.0,
    local_steps: _LocalSteps = None,
    wan: _Wan = "wan-100m",
    sites: _Sites = None,
    compression: _Compression = 1.0,
    svg: _Svg = None,
    trace: _Trace = None,
    run_dir: _RunDir = None,
    expand: _Expand = False,
    json: JsonFile = None,
) -> None:
    """Play a plan of RECIPE on a cluster that need not be there."""
    for path, option in ((json, "--json"), (svg, "--svg"), (trace, "--trace")):
        check_result_file(path, option)
        if path == STDOUT and option != "--json":
            raise RequestError(f"{option} - would write among the results; name a file")
    check_folder(run_dir, "--run-dir")
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.simulated import print_result
    from shoal.cli.train import OwnParts
    from shoal.planner.simulation.conditions import Conditions, check_conditions, parse_slow
    from shoal.planner.simulation.local_sgd import find_link
    from shoal.tuning.simulation_request import SimulationRequest, read_simulation

    conditions = Conditions(
        slow=tuple(parse_slow(text) for text in (*(straggler or ()), *(slow or ()))),
        jitter=jitter,
        link_jitter=link_jitter,
        seed=seed,
    )
    changes = [*(overrides or ()), *([f"train.global_batch={global_batch}"] if global_batch is not None else [])]
    request = SimulationRequest(
        recipe=recipe,
        cluster=cluster,
        plan=plan,
        num_devices=devices,
        overrides=tuple(changes),
        num_sites=sites,
        is_local=local_steps is not None,
    )
    find_link(wan)
    failing = None
    if mtbf is not None:
        failing = _Failing(hours=mtbf, restart=restart, checkpoint=checkpoint, interval=interval, days=days)
        failing.check()
    asked = read_simulation(request, own=OwnParts())
    if asked.derived is not None:
        # Known before the model is traced, which may take a while.
        print(f"note: {asked.derived}", file=sys.stderr, flush=True)
    check_conditions(conditions, asked.plan)
    _check_steps(asked, conditions, num_steps=steps, local_steps=local_steps)
    played = _play(asked, conditions, num_steps=steps)
    result = played.result
    if local_steps is not None:
        result["wide_area"] = _average(played, conditions, period=local_steps, wan=wan, compression=compression)
    if failing is not None:
        result["goodput"] = _fail(played, failing, seed=seed)
    _write_files(played, svg=svg, trace=trace, run_dir=run_dir, expand=expand, failing=failing, seed=seed)
    print_result(asked, result)
    write_result(json, result)


def _check_steps(asked: "Asked", conditions: "Conditions", *, num_steps: int | None, local_steps: int | None) -> None:
    """Refuse what would be played for ever, before the model is traced."""
    from shoal.planner.simulation.limits import check_steps

    plan, count = asked.site_plan, asked.plan.microbatches or 1
    if num_steps is not None:
        check_steps(plan, count, conditions, num_steps=num_steps, num_sites=asked.num_sites, option="--steps")
    if local_steps is not None:
        check_steps(plan, count, conditions, num_steps=local_steps, num_sites=asked.num_sites, option="--local-steps")


@dataclass(frozen=True, kw_only=True)
class _Failing:
    """What ``--mtbf`` and its companions say."""

    hours: float
    restart: float
    checkpoint: float
    interval: str
    days: float

    def check(self) -> None:
        """Refuse what cannot be, before anything is priced."""
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

    def of(self, num_devices: int) -> "Failures":
        from shoal.planner.simulation.goodput import Failures

        return Failures(
            device_mtbf=self.hours * 3600.0, num_devices=num_devices, restart=self.restart, checkpoint=self.checkpoint
        )

    def steps_between(self, step_seconds: float, num_devices: int) -> int:
        from shoal.planner.simulation.goodput import best_interval

        return best_interval(step_seconds, self.of(num_devices)) if self.interval == "auto" else int(self.interval)


@dataclass
class _Played:
    """A step of one site, as it was played."""

    asked: "Asked"
    priced: "Priced"
    simulated: "Simulated"
    seconds: "Array"
    result: dict[str, Any]
    step_seconds: float
    """From one step to the next, averages between sites included."""


def _play(asked: "Asked", conditions: "Conditions", *, num_steps: int | None) -> _Played:
    from shoal.planner.simulation.conditions import split_sites
    from shoal.planner.simulation.limits import most_steps
    from shoal.planner.simulation.report import describe_step
    from shoal.planner.simulation.step import simulate_step, step_times
    from shoal.tuning.simulation import price_asked

    own = split_sites(conditions, asked.plan, asked.num_sites)[0] if asked.num_sites > 1 else conditions
    priced = price_asked(asked)
    plan = asked.site_plan
    simulated = simulate_step(priced.parts, plan=plan, conditions=own, needed=priced.needed)
    most = most_steps(plan, asked.plan.microbatches or 1, conditions, num_sites=asked.num_sites)
    count = num_steps or (min(_DRAWN, most) if conditions.varies else 1)
    seconds = step_times(priced.parts, simulated.order.schedule, plan=plan, conditions=own, num_steps=count)
    tokens = asked.global_batch * priced.tokens
    result = {
        "cluster": asked.cluster.device.name,
        "devices": asked.plan.world_size,
        "global_batch": asked.global_batch,
        "micro_batch": asked.micro_batch,
        "device_memory_bytes": asked.cluster.device.memory_bytes,
        **describe_step(simulated, seconds, tokens=tokens),
        "plan": str(asked.plan),
        "site_plan": str(plan) if asked.num_sites > 1 else None,
        "world_size": asked.plan.world_size,
        "conditions": {
            "slow": [str(each) for each in conditions.slow],
            "jitter": conditions.jitter,
            "link_jitter": conditions.link_jitter,
            "seed": conditions.seed,
        },
        "fits": _fits(simulated, asked),
        "remarks": [*([] if asked.derived is None else [asked.derived]), *asked.remarks],
        "goodput": None,
        "wide_area": None,
    }
    return _Played(asked, priced, simulated, seconds, result, float(seconds.mean()))


def _fits(simulated: "Simulated", asked: "Asked") -> bool:
    """Whether every rank has room for what it holds at its fullest."""
    peaks = [simulated.peak_bytes(place) or 0.0 for place in range(simulated.num_places)]
    return max(peaks) <= asked.cluster.device.memory_bytes


def _average(played: _Played, conditions: "Conditions", *, period: int, wan: str, compression: float) -> dict[str, Any]:
    import numpy as np

    from shoal.planner.simulation.conditions import split_sites
    from shoal.planner.simulation.local_sgd import LocalUpdates, find_link, simulate_rounds
    from shoal.planner.simulation.report import describe_sites
    from shoal.planner.simulation.step import step_times

    asked, link = played.asked, find_link(wan)
    updates = LocalUpdates(
        period=period,
        num_sites=asked.num_sites,
        num_bytes=played.priced.weight_bytes,
        bandwidth=link.bandwidth,
        latency=link.latency,
        compression=compression,
    )
    sites = split_sites(conditions, asked.plan, asked.num_sites)
    schedule, count = played.simulated.order.schedule, max(period, len(played.seconds))
    known: dict[Any, Array] = {}
    rows = []
    for site in sites:
        # Sites without draws of their own that are slow in the same places are alike.
        key = site.slow if not site.varies else site
        if key not in known:
            known[key] = step_times(
                played.priced.parts, schedule, plan=asked.site_plan, conditions=site, num_steps=count
            )
        rows.append(known[key])
    pace = simulate_rounds(np.array(rows), updates, link_jitter=conditions.link_jitter, seed=conditions.seed)
    tokens = played.result["tokens_per_step"]
    found = describe_sites(updates, pace, step_seconds=played.step_seconds, tokens=tokens)
    played.step_seconds = 1.0 / pace.steps_per_second
    return found


def _run_with_failures(played: _Played, failing: _Failing, *, num_steps: int, seed: int) -> "Goodput":
    from shoal.planner.simulation.goodput import simulate_goodput

    num_devices = played.asked.plan.world_size
    return simulate_goodput(
        failing.of(num_devices),
        step_seconds=played.step_seconds,
        interval_steps=failing.steps_between(played.step_seconds, num_devices),
        num_steps=num_steps,
        seed=seed,
    )


def _fail(played: _Played, failing: _Failing, *, seed: int) -> dict[str, Any]:
    from shoal.planner.simulation.report import describe_goodput

    num_steps = max(1, round(failing.days * 86_400.0 / played.step_seconds))
    run = _run_with_failures(played, failing, num_steps=num_steps, seed=seed)
    failures = failing.of(played.asked.plan.world_size)
    return {"days": failing.days, **describe_goodput(failures, run, step_seconds=played.step_seconds)}


def _write_files(
    played: _Played,
    *,
    svg: Path | None,
    trace: Path | None,
    run_dir: Path | None,
    expand: bool,
    failing: _Failing | None,
    seed: int,
) -> None:
    from shoal.planner.simulation.trace import MOST_LANES, draw_step, num_lanes, write_trace

    files: dict[str, str] = {}
    lanes = num_lanes(played.simulated, expand=expand)
    cut = [name for name, path in (("the picture", svg), ("the trace", None if expand else trace)) if path is not None]
    if cut and lanes > MOST_LANES:
        what = "ranks" if expand else "groups of ranks"
        verb = "show" if len(cut) > 1 else "shows"
        played.result["remarks"].append(
            f"{' and '.join(cut)} {verb} {MOST_LANES} of {lanes} {what}, the slowest replica's first"
        )
    if svg is not None:
        svg.write_text(draw_step(played.simulated, expand=expand))
        files["svg"] = str(svg)
    if trace is not None:
        write_trace(trace, played.simulated, expand=expand)
        files["trace"] = str(trace)
    if run_dir is not None:
        _write_run(played, run_dir, expand=expand, failing=failing, seed=seed)
        files["run_dir"] = str(run_dir)
    played.result["files"] = files


def _write_run(played: _Played, run_dir: Path, *, expand: bool, failing: _Failing | None, seed: int) -> None:
    import numpy as np

    from shoal.core.rundir import RunDir, replace_text
    from shoal.planner.simulation.run_directory import RunNumbers, write_run
    from shoal.trainer.config import dump_recipe

    asked, seconds = played.asked, played.seconds
    if asked.num_sites > 1:
        raise RequestError(
            "--run-dir writes runs whose replicas sum at every step; leave --local-steps or --run-dir out"
        )
    goodput = None
    if failing is not None:
        # Failures fall on steps of one length: the mean of those that were played.
        seconds = np.full(len(seconds), played.step_seconds)
        goodput = _run_with_failures(played, failing, num_steps=len(seconds), seed=seed)
    numbers = RunNumbers(
        samples=asked.global_batch,
        tokens=round(played.result["tokens_per_step"]),
        weight_bytes=played.priced.weight_bytes,
        checkpoint_every=0 if failing is None else asked.recipe.checkpoint.every,
        checkpoint_seconds=0.0 if failing is None else failing.checkpoint,
        memory_every=asked.recipe.telemetry.memory_every,
    )
    write_run(run_dir, played.simulated, seconds, numbers=numbers, goodput=goodput, expand=expand)
    replace_text(RunDir(run_dir).recipe, dump_recipe(asked.recipe))
