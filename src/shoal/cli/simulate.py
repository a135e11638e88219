"""``shoal simulate``: play a plan on a cluster without it: step time, bubble, memory, timeline, goodput."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import (
    STDOUT,
    ClusterName,
    JsonFile,
    Overrides,
    RecipeFile,
    check_folder,
    check_result_file,
    print_table,
    say_seconds,
    write_result,
)
from shoal.core.errors import RequestError
from shoal.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from shoal.tuning.simulation_request import Asked

_Plan = Annotated[str | None, typer.Option("--plan", metavar="TEXT", help="The plan; the recipe's when left out.")]
_Batch = Annotated[
    int | None,
    typer.Option("--global-batch", metavar="B", help="Samples of a step; the recipe's, or what the plan needs."),
]
_Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Steps to play.")]
_Devices = Annotated[int | None, typer.Option("--devices", metavar="N", help="Devices, in place of the cluster's.")]
_Straggler = Annotated[
    list[str] | None,
    typer.Option("--straggler", metavar="RANK:FACTOR", help="A rank that takes FACTOR times as long; repeatable."),
]
_Slow = Annotated[
    list[str] | None,
    typer.Option(
        "--slow", metavar="AXIS=INDEX:FACTOR", help="All ranks with this index along islands, pp, dp, cp or tp."
    ),
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
    recipe: RecipeFile,
    cluster: ClusterName,
    plan: _Plan = None,
    global_batch: _Batch = None,
    steps: _Steps = None,
    devices: _Devices = None,
    overrides: Overrides = None,
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
    from shoal.cli.train import OwnParts
    from shoal.tuning.simulation_request import SimulationOptions, SimulationRequest, check_simulation

    options = SimulationOptions(
        steps=steps,
        straggler=straggler or (),
        slow=slow or (),
        jitter=jitter,
        link_jitter=link_jitter,
        seed=seed,
        mtbf=mtbf,
        restart=restart,
        checkpoint=checkpoint,
        interval=interval,
        days=days,
        local_steps=local_steps,
        wan=wan,
        compression=compression,
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
    asked = check_simulation(request, options, own=OwnParts())
    if asked.derived is not None:
        # Known before the model is traced, which may take a while.
        print(f"note: {asked.derived}", file=sys.stderr, flush=True)
    # Torch is imported only now, when the request is known to be right.
    from shoal.tuning.simulation import run_simulation

    result = run_simulation(asked, options, svg=svg, trace=trace, run_dir=run_dir, expand=expand).as_values()
    _print_result(asked, result)
    write_result(json, result)


def _print_result(asked: "Asked", result: Mapping[str, Any]) -> None:
    """Print a line for each thing that a simulation found, and a table of the pipeline's places."""
    for warning in result["remarks"]:
        # What was derived is said on stderr, before the simulation.
        if warning != asked.derived:
            _line("note", warning)
    _line("plan", f"{asked.plan}, {result['devices']} x {result['cluster']}")
    _line(
        "batch",
        f"{result['global_batch']} samples in {result['microbatches']} microbatch(es) of {result['micro_batch']}",
    )
    _line("step", f"{say_seconds(result['step_seconds'])}, {_pace(result, result['tokens_per_second'])}")
    spread = result["steps"]
    if spread["max"] > spread["p50"]:
        parts = (f"{name} {say_seconds(spread[name])}" for name in ("p50", "p90", "p99", "max"))
        _line(f"{spread['count']} steps", ", ".join(parts))
    if result["schedule"] is not None:
        _line(
            "pipeline",
            f"{say_seconds(result['pipeline_seconds'])} of {result['schedule']}, {result['bubble']:.1%} idle",
        )
    elif result["bubble"] > 0:
        _line("idle", f"{result['bubble']:.1%} of the ranks' time: they wait for the slowest")
    whole = sum(result["breakdown"].values()) or 1.0
    shares = (f"{what} {seconds / whole:.1%}" for what, seconds in _largest_first(result["breakdown"]))
    _line("time goes to", ", ".join(shares))
    exposed = (f"{axis} {say_seconds(seconds)}" for axis, seconds in _largest_first(result["exposed"]))
    _line("communication", ", ".join(exposed) or "none that the step waits for")
    if not result["fits"]:
        place = max(result["places"], key=lambda place: float(place["memory"]["peak"]))
        _line(
            "memory",
            f"does not fit: place {place['place']} needs {format_bytes(place['memory']['peak'])}, and a {result['cluster']} has "
            f"{format_bytes(result['device_memory_bytes'])}; raise pp, tp, zero or recompute, or take more microbatches",
        )
    _print_sites(result)
    _print_goodput(result["goodput"])
    _print_periods(result["wide_area"])
    _print_places(result)
    if result["files"]:
        print()
        _line("wrote", ", ".join(result["files"].values()))


def _line(name: str, text: str) -> None:
    print(f"{name:<16} {text}")


def _largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, value) for name, value in seconds.items() if value > 0), key=lambda pair: -pair[1])


def _pace(result: Mapping[str, Any], per_second: float | None) -> str:
    """Tokens a second; where a sample is one item, as of images, samples."""
    items = "tokens" if result["tokens_per_step"] > result["global_batch"] else "samples"
    return f"{format_count(per_second or 0)} {items}/s"


def _print_sites(result: Mapping[str, Any]) -> None:
    sites = result["wide_area"]
    agreed = result["agreed"]
    if agreed is not None:
        _line(
            "agreement",
            f"{format_bytes(agreed['bytes_per_step'])} leave a rank in a step, {format_bytes(agreed['state_bytes'])} of state"
            + (f", {say_seconds(agreed['codec_seconds'])} of encoding and decoding" if agreed["codec_seconds"] else "")
            + "; does not equal one process",
        )
    if sites is None:
        return
    if "policy" in sites:
        hidden = f", needed {sites['delay_steps']} steps later" if sites["delay_steps"] else ""
        _line(
            f"{sites['sites']} islands",
            f"{sites['policy']}: a round of {format_bytes(sites['bytes_per_sync'])} takes "
            f"{say_seconds(sites['sync_seconds'])}{hidden}; {sites['communication']:.1%} of the time; a step of an island "
            f"alone {say_seconds(sites['island_step_seconds'])}, the longest {say_seconds(sites['longest_seconds'])}",
        )
        return
    _line(
        f"{sites['sites']} sites",
        f"an average of {format_bytes(sites['bytes_per_sync'] / sites['compression'])} every {sites['period']} steps takes "
        f"{say_seconds(sites['sync_seconds'])}: {sites['steps_per_second']:.4g} steps/s, "
        f"{sites['communication']:.1%} of the time, {_pace(result, sites['tokens_per_second'])}",
    )


def _print_periods(sites: Mapping[str, Any] | None) -> None:
    if sites is None or not sites["by_period"]:
        return
    print()
    rows = [
        (
            pace["period"],
            f"{pace['steps_per_second']:.4g}",
            f"{pace['communication']:.1%}",
            f"{format_bytes(pace['bytes_per_step'])}",
        )
        for pace in sites["by_period"]
    ]
    print_table(("local steps", "steps/s", "communication", "sent per step"), rows)


def _print_goodput(goodput: Mapping[str, Any] | None) -> None:
    if goodput is None:
        return
    _line(
        "failures",
        f"every {format_duration(goodput['mtbf_seconds'])}; a checkpoint every {goodput['interval_steps']} steps "
        f"({format_duration(goodput['interval_seconds'])}; Young's optimum {format_duration(goodput['young_interval_seconds'])})",
    )
    _line(
        "goodput",
        f"{goodput['goodput']:.2%} over {goodput['days']:g} days of work with {goodput['failures']} failures "
        f"({goodput['expected_goodput']:.2%} expected); a failure loses {format_duration(goodput['loss_per_failure_seconds'])}",
    )


def _print_places(result: Mapping[str, Any]) -> None:
    places = result["places"]
    has_memory = places[0]["memory"] is not None
    # Where replicas differ, the slowest one's work is shown beside the mean, which is what the share of idle time is made of.
    has_slowest = len(result["replicas"]) > 1
    columns = ["place", "ranks", "stages", "busy", "idle", *(["slowest busy"] if has_slowest else [])]
    columns += ["weights", "gradients", "optimizer", "activations", "other", "peak", "free"] if has_memory else []
    rows = []
    for place in places:
        stages = place["stages"]
        shown = ", ".join(map(str, stages)) if len(stages) <= 4 else f"{stages[0]}, {stages[1]}, ... {stages[-1]}"
        row = [
            place["place"],
            place["num_ranks"],
            shown,
            say_seconds(place["mean_busy_seconds"]),
            say_seconds(place["mean_idle_seconds"]),
            *([say_seconds(place["busy_seconds"])] if has_slowest else []),
        ]
        if has_memory:
            memory = place["memory"]
            names = ("weights", "gradients", "optimizer", "activations", "other", "peak")
            row += [format_bytes(memory[name]) for name in names]
            row.append(format_bytes(result["device_memory_bytes"] - memory["peak"]))
        rows.append(row)
    print()
    print_table(columns, rows)
