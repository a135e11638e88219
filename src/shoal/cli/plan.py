"""``shoal plan``: the best plans for a recipe on a cluster that need not be here, with memory, time, and why."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import (
    STDOUT,
    ClusterName,
    JsonFile,
    Overrides,
    RecipeFile,
    check_result_file,
    print_table,
    say_seconds,
    write_result,
)
from shoal.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from shoal.planner.search.estimate import Estimate
    from shoal.planner.search.search import Found
    from shoal.tuning.planning import Answer

_COLUMNS = ("", "plan", "precision", "step", "{items}/s", "MFU", "bubble", "exposed", "memory", "head room")
_WORTH = 0.005
"""Share of a step that a split of each layer's own must gain to be spoken of."""
_FEW = 8
"""Places of a pipeline whose memory is printed one by one."""
_Batch = Annotated[int | None, typer.Option("--global-batch", metavar="B", help="Samples of a step.")]
_Top = Annotated[int, typer.Option("--top", metavar="K", help="How many plans to show.")]
_WhyNot = Annotated[str | None, typer.Option("--why-not", metavar="PLAN", help="Compare this plan with the best.")]
_Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="TYPES",
        help="Compute types to rank together, such as bfloat16,float8; the recipe's own when left out.",
    ),
]
_Allow = Annotated[
    str | None,
    typer.Option(
        "--allow",
        metavar="lossy",
        help="Rank all policies and codecs by which replicas could agree, none of which equals one process.",
    ),
]


def plan(
    recipe: RecipeFile,
    cluster: ClusterName,
    global_batch: _Batch = None,
    top: _Top = 5,
    why_not: _WhyNot = None,
    precision: _Precision = None,
    allow: _Allow = None,
    overrides: Overrides = None,
    json: JsonFile = None,
) -> None:
    """Rank the plans for RECIPE on a cluster that need not be here."""
    check_result_file(json)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.tuning.options import check_options

    allowed = [word.strip() for word in allow.split(",")] if allow is not None else []
    check_options(top=top, allow=allowed)
    from shoal.tuning.planning import plan as rank_plans

    answer = rank_plans(
        recipe,
        cluster,
        global_batch=global_batch,
        top=top,
        why_not=why_not,
        precisions=[word.strip() for word in precision.split(",")] if precision is not None else (),
        overrides=overrides or (),
        allow=allowed,
    )
    if json != STDOUT:
        print_answer(answer)
    write_result(json, answer.as_values())


def print_answer(answer: "Answer") -> None:
    """Print an answer: the table first, then what there is to say about it."""
    job, found = answer.job, answer.found
    print(
        f"{job.chain.name}: {format_count(job.chain.weights)} parameters on {job.cluster.num_devices} x "
        f"{job.cluster.device.name}, "
        f"{job.global_batch} samples a step; {found.num_plans} plans in {found.seconds:.1f} s"
    )
    print()
    rows = _rows(answer)
    # Of images and rows of a table a sample is one item, and nobody calls it a token.
    items = "tokens" if job.chain.tokens > 1 else "samples"
    columns = [column.format(items=items) for column in _COLUMNS]
    print_table(columns, [_line(number, one) for number, one in enumerate(rows, start=1)])
    device = job.cluster.device
    if device.context_bytes:
        print(
            f"memory and head room are of {format_bytes(device.free_bytes)}: a process takes "
            f"{format_bytes(device.context_bytes)} of a device's {format_bytes(device.memory_bytes)} for itself"
        )
    print()
    print("\n".join(answer.reasons))
    places = _places(found.ranked[0])
    if places:
        print(places)
    for line in (
        *_refused(found),
        *answer.why_not,
        *answer.warnings,
        *_caveats(answer, rows),
        *_commands(answer, rows),
        *_splits(answer),
    ):
        print(line)
    _print_ways(answer)
    stack = job.stack
    if job.cluster.reached is not None:
        print(
            f"times are made of what was measured ({stack.fitted_on}), and no run checked them: `shoal train --plan auto` and "
            "`shoal tune` rehearse plans there"
        )
    elif not stack.is_fitted:
        print(
            f"no run of {stack.software.name} on {job.cluster.device.name} was there to calibrate on: times may be off by a "
            f"third; "
            f"constants are from {stack.fitted_on.split(';')[0] or 'data sheets'}"
        )


def _rows(answer: "Answer") -> list["Estimate"]:
    """The ranking, one that runs where none of it does, and the best in faster precisions."""
    extra = (answer.found.runnable,) if answer.found.runnable is not None else ()
    return [*answer.found.ranked, *extra, *answer.others]


def _line(number: int, found: "Estimate") -> tuple[object, ...]:
    # What ranks wait for each other between stages is in the bubble already.
    apart = ("pp",) if found.parts.overlaps_transfer else ()
    exposed = sum(share for axis, share in found.exposed.items() if axis not in apart)
    return (
        f"{number}*" if found.not_executed else number,
        found.plan,
        found.precision,
        f"{found.seconds:.4g} s",
        format_count(found.tokens_per_second),
        f"{found.utilisation:.1%}",
        f"{found.bubble:.1%}",
        f"{exposed:.1%}",
        format_bytes(found.memory.allocated),
        format_bytes(found.headroom),
    )


def _places(best: "Estimate") -> str:
    """The memory of the best plan's pipeline places, where they differ."""
    held = [format_bytes(place.allocated) for place in best.places]
    if len(set(held)) <= 1:
        return ""
    if len(held) <= _FEW:
        return f"memory of 1 by place in the pipeline: {', '.join(held)}"
    fullest = max(range(len(held)), key=lambda place: best.places[place].allocated)
    shown = f"{', '.join(held[: _FEW - 2])}, ... {held[-1]}"
    return f"memory of 1 by place in the pipeline: {shown}; the fullest is place {fullest}, with {held[fullest]}"


def _refused(found: "Found") -> Iterator[str]:
    """The fastest plan that memory refused and by how much, or that there is none."""
    from shoal.planner.search.search import AS_GOOD

    refused, best = found.refused, found.ranked[0]
    if refused is None:
        yield "refused by memory: none, all plans fit"
        return
    named = f"{refused.plan} in {refused.precision}" if refused.precision != best.precision else str(refused.plan)
    line = f"refused by memory: {named} would take {refused.seconds:.4g} s, and lacks {format_bytes(-refused.headroom)} a device"
    # A plan that is a little slower is chosen where it is simpler.
    slower = refused.seconds / min(one.seconds for one in found.ranked)
    if slower > AS_GOOD:
        line += f"; it is {slower - 1:.1%} slower than the fastest that fits, and would not have been chosen anyway"
    yield line


def _caveats(answer: "Answer", rows: list["Estimate"]) -> Iterator[str]:
    """Which rows cannot be run as they are, or would not compute what the recipe does."""
    starred = list(dict.fromkeys(word.partition("=")[0] for one in rows for word in one.not_executed))
    if starred:
        runs = next((number for number, one in enumerate(rows, start=1) if not one.not_executed), None)
        fastest = "none of these runs" if runs is None else f"the fastest of these that runs is {runs}"
        yield f"* is priced and not executed by Shoal yet ({', '.join(starred)}); {fastest}"
    for precision in dict.fromkeys(one.precision for one in rows):
        if precision != answer.job.precision:
            numbers = [str(number) for number, one in enumerate(rows, start=1) if one.precision == precision]
            yield (
                f"{precision} ({', '.join(numbers)}) is not the recipe's {answer.job.precision}: numerics change, and the loss "
                f"with them"
            )


def _commands(answer: "Answer", rows: list["Estimate"]) -> Iterator[str]:
    """How to run the best plan, and the best in each other precision, of those that Shoal executes."""
    printed: set[str] = set()
    for number, one in enumerate(rows, start=1):
        command = answer.command(one)
        if command is not None and one.precision not in printed:
            printed.add(one.precision)
            yield f"run {number} with: {command}"


_WAYS = ("", "plan", "step", "longest", "faster", "sent per step", "codec", "memory", "head room")


def _print_ways(answer: "Answer") -> None:
    """Print the other ways to agree, and how to run the first of them where that was asked for."""
    if not answer.ways:
        if "lossy" in answer.request.allow:
            print("other ways to agree: none, there is nothing to agree on, or none fits")
        return
    print()
    print("other ways to agree, which do not equal one process: the loss changes, and by how much is not predicted")
    rows, best = [], answer.found.ranked[0]
    for number, way in enumerate(answer.ways, start=1):
        found = way.found
        times = found.agreement
        assert times is not None, "another way to agree has its times"
        mark = f"~{number}*" if found.not_executed else f"~{number}"
        rows.append(
            (
                mark,
                found.plan,
                f"{found.seconds:.4g} s",
                f"{found.longest_seconds:.4g} s",
                f"{best.seconds / found.seconds:.2f}x",
                format_bytes(times.bytes_per_step),
                say_seconds(times.codec_seconds) if found.plan.compress else "",
                format_bytes(found.memory.allocated),
                format_bytes(found.headroom),
            )
        )
    print_table(_WAYS, rows)
    print("step is the mean, longest a step with a round; sent is what leaves a rank; faster is beside plan 1")
    lost = [f"~{number}" for number, way in enumerate(answer.ways, start=1) if not way.is_worth]
    if lost:
        print(
            f"not worth it: {', '.join(lost)}; encoding takes more than the bytes that it saves, or rounds more than sums"
        )
    if any(way.found.not_executed for way in answer.ways):
        words = dict.fromkeys(word.partition("=")[0] for way in answer.ways for word in way.found.not_executed)
        print(f"* is priced and not executed by Shoal yet ({', '.join(words)})")
    if "lossy" not in answer.request.allow:
        print("--allow lossy ranks all of them, and says how to run them")
        return
    first = next((way for way in answer.ways if way.is_worth and answer.command(way.found) is not None), None)
    if first is not None:
        print(f"run ~{answer.ways.index(first) + 1} with: {answer.command(first.found)}")


def _splits(answer: "Answer") -> Iterator[str]:
    choices, layers = answer.choices, answer.job.chain.layers
    gain = 0.0 if choices is None else 1 - choices.seconds / choices.uniform_seconds
    if choices is not None and gain >= _WORTH:
        yield f"a split of each layer's own could be {gain:.1%} faster than one for all ({choices.uniform}):"
        for split, first, end in choices.runs():
            yield f"  {layers[first].name} to {layers[end - 1].name}: {split}"
    elif choices is not None:
        yield f"a split of each layer's own would gain nothing over one for all ({choices.uniform})"
