"""``shoal plan``: the best plans for a recipe on a cluster that need not be here, with memory, time, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.result import STDOUT, JsonFile, check_result_file, print_table, write_result

if TYPE_CHECKING:
    from shoal.planner.estimate import Estimate
    from shoal.trainer.forecasts.planning import Answer

_COLUMNS = ("", "plan", "step", "tokens/s", "MFU", "bubble", "exposed", "memory", "head room")

_WORTH = 0.005
"""Share of a step that a split of each layer's own must gain to be spoken of."""

_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
_Cluster = Annotated[
    str, typer.Option("--cluster", metavar="NAME:NODESxDEVICES", help="Where, such as a100-80gb:16x8.")
]
_Batch = Annotated[int | None, typer.Option("--global-batch", metavar="B", help="Samples of a step.")]
_Top = Annotated[int, typer.Option("--top", metavar="K", help="How many plans to show.")]
_WhyNot = Annotated[str | None, typer.Option("--why-not", metavar="PLAN", help="Compare this plan with the best.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
]


def plan(
    recipe: _Recipe,
    cluster: _Cluster,
    global_batch: _Batch = None,
    top: _Top = 5,
    why_not: _WhyNot = None,
    overrides: _Set = None,
    json: JsonFile = None,
) -> None:
    """Rank the plans for RECIPE on a cluster that need not be here."""
    check_result_file(json)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.train import OwnParts
    from shoal.trainer.forecasts.planning import PlanRequest, plan_for

    answer = plan_for(
        PlanRequest(
            recipe=recipe,
            cluster=cluster,
            global_batch=global_batch,
            overrides=tuple(overrides or ()),
            top=top,
            why_not=why_not,
        ),
        own=OwnParts(),
    )
    if json != STDOUT:
        _print(answer)
    write_result(json, _values(answer, cluster))


def _print(answer: "Answer") -> None:
    from shoal.core.units import format_bytes, format_count

    job, found = answer.job, answer.found
    print(
        f"{job.chain.name}: {format_count(job.chain.weights)} parameters on {job.cluster.num_devices} x "
        f"{job.cluster.device.name}, "
        f"{job.global_batch} samples a step, {job.precision}; {found.num_plans} plans in {found.seconds:.1f} s"
    )
    print()
    print_table(_COLUMNS, [_line(number, one) for number, one in enumerate(found.ranked, start=1)])
    print()
    print("\n".join(answer.reasons))
    if found.refused is not None:
        print(
            f"refused by memory: {found.refused.plan} would take {found.refused.seconds:.4g} s, and lacks "
            f"{format_bytes(-found.refused.headroom)} a device"
        )
    for line in answer.why_not:
        print(line)
    gain = 0.0 if answer.choices is None else 1 - answer.choices.seconds / answer.choices.uniform_seconds
    if answer.choices is not None and gain >= _WORTH:
        print(f"a split of each layer's own could be {gain:.1%} faster than one for all ({answer.choices.uniform}):")
        for split, first, end in answer.choices.runs():
            print(f"  {job.chain.layers[first].name} to {job.chain.layers[end - 1].name}: {split}")
    stack = job.stack
    if not stack.is_fitted:
        print(
            f"no run of {stack.software.name} on {job.cluster.device.name} was there to calibrate on: times may be off by a "
            f"third; "
            f"constants are from {stack.fitted_on.split(';')[0] or 'data sheets'}"
        )


def _line(number: int, found: "Estimate") -> tuple[object, ...]:
    from shoal.core.units import format_bytes, format_count

    exposed = sum(share for axis, share in found.exposed.items() if axis != "pp")
    return (
        number,
        found.plan,
        f"{found.seconds:.4g} s",
        format_count(found.tokens_per_second),
        f"{found.utilisation:.1%}",
        f"{found.bubble:.1%}",
        f"{exposed:.1%}",
        format_bytes(found.memory.allocated),
        format_bytes(found.headroom),
    )


def _values(answer: "Answer", cluster: str) -> dict[str, object]:
    job, found = answer.job, answer.found
    return {
        "model": job.chain.name,
        "parameters": job.chain.weights,
        "cluster": cluster,
        "devices": job.cluster.num_devices,
        "global_batch": job.global_batch,
        "precision": job.precision,
        "in_range": job.stack.is_fitted,
        "plans": [one.as_dict() for one in found.ranked],
        "refused": None if found.refused is None else found.refused.as_dict(),
        "why": list(answer.reasons),
        "why_not": list(answer.why_not),
        "asked": None if answer.asked is None else answer.asked.as_dict(),
        "num_plans": found.num_plans,
        "search_s": found.seconds,
        "per_layer": None
        if answer.choices is None
        else {
            "seconds": answer.choices.seconds,
            "uniform_seconds": answer.choices.uniform_seconds,
            "splits": [str(split) for split in answer.choices.splits],
        },
    }
