"""``shoal plan``: the best plans for a recipe on a cluster that need not be here, with memory, time, and why."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.result import STDOUT, JsonFile, check_result_file, write_result

_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
_Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME:NODESxDEVICES[@LINK]|FILE",
        help="Where, such as a100-80gb:16x8, or a100-80gb:16x8@ethernet-100g.",
    ),
]
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
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; KEY= unsets it.")
]


def plan(
    recipe: _Recipe,
    cluster: _Cluster,
    global_batch: _Batch = None,
    top: _Top = 5,
    why_not: _WhyNot = None,
    precision: _Precision = None,
    overrides: _Set = None,
    json: JsonFile = None,
) -> None:
    """Rank the plans for RECIPE on a cluster that need not be here."""
    check_result_file(json)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.planned import answer_values, print_answer
    from shoal.cli.train import OwnParts
    from shoal.tuning.planning import PlanRequest, plan_for

    request = PlanRequest(
        recipe=recipe,
        cluster=cluster,
        global_batch=global_batch,
        overrides=tuple(overrides or ()),
        top=top,
        why_not=why_not,
        precisions=tuple(word.strip() for word in precision.split(",")) if precision is not None else (),
    )
    answer = plan_for(request, own=OwnParts())
    if json != STDOUT:
        print_answer(answer, request)
    write_result(json, answer_values(answer, request))
