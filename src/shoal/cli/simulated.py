"""What ``shoal simulate`` prints: a line for each thing that a simulation found, and a table of the pipeline's places."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli.result import print_table
from shoal.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from shoal.tuning.simulation_request import Asked


def print_result(asked: "Asked", result: Mapping[str, Any]) -> None:
    """Print a result as ``cli/simulate.py`` puts it together."""
    for remark in result["remarks"]:
        # What was derived is said on stderr, before the simulation.
        if remark != asked.derived:
            _line("note", remark)
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


def say_seconds(seconds: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _pace(result: Mapping[str, Any], per_second: float | None) -> str:
    """Tokens a second; where a sample is one item, as of images, samples."""
    items = "tokens" if result["tokens_per_step"] > result["global_batch"] else "samples"
    return f"{format_count(per_second or 0)} {items}/s"


def _print_sites(result: Mapping[str, Any]) -> None:
    sites = result["wide_area"]
    if sites is None:
        return
    _line(
        f"{sites['sites']} sites",
        f"an average of {format_bytes(sites['bytes_per_sync'] / sites['compression'])} every {sites['period']} steps takes "
        f"{say_seconds(sites['sync_seconds'])}: {sites['steps_per_second']:.4g} steps/s, "
        f"{sites['communication']:.1%} of the time, {_pace(result, sites['tokens_per_second'])}",
    )


def _print_periods(sites: Mapping[str, Any] | None) -> None:
    if sites is None:
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
