"""``shoal predict``: predict the runs that a table lists, and say how good the predictions are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.result import JsonFile, check_result_file, print_table, write_result
from shoal.core.errors import RunError

if TYPE_CHECKING:
    from shoal.planner.score import Score

_COLUMNS = (
    "source",
    "rows",
    "MAPE",
    "p90",
    "bias",
    "tau",
    "regret",
    "OOM precision",
    "OOM recall",
    "out of range",
    "not predicted",
)

_Table = Annotated[Path, typer.Argument(metavar="FILE.csv", help="A table of runs, a row for each measured value.")]


def predict(table: _Table, json: JsonFile = None) -> None:
    """Predict every run of a table from its model, devices and plan, and compare with what was measured."""
    check_result_file(json)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.planner.predict import predict_run
    from shoal.planner.score import score, score_by_source, short_names
    from shoal.planner.table import read_table

    rows = [predict_run(run) for run in read_table(table)]
    sources = score_by_source(rows)
    names = short_names(sources)
    lines = [_line(names[source], found) for source, found in sources.items()]
    print_table(_COLUMNS, [*lines, _line("all", score(rows))])
    missing = [row for row in rows if row.predicted is None]
    if missing:
        print()
        for reason in dict.fromkeys(row.why_not for row in missing):
            numbers = [row.row for row in missing if row.why_not == reason]
            print(f"not predicted: {len(numbers)} row(s), the first is row {numbers[0]}, counted from 0: {reason}")
    write_result(
        json,
        {
            "rows": [row.as_dict() for row in rows],
            "sources": {source: found.as_dict() for source, found in sources.items()},
            "all": score(rows).as_dict(),
        },
    )
    if len(missing) == len(rows):
        raise RunError(f"none of the {len(rows)} row(s) of {table} could be predicted; the reasons are above")


def _line(name: str, found: "Score") -> tuple[object, ...]:
    return (
        name,
        found.count,
        *(_share(value) for value in (found.mape, found.p90, found.bias)),
        "" if found.kendall_tau is None else f"{found.kendall_tau:.2f}",
        *(_share(value) for value in (found.regret, found.oom_precision, found.oom_recall)),
        found.out_of_range,
        found.unpredicted,
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
