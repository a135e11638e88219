"""``shoal predict``: predict the runs that a table lists, and say how good the predictions are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import STDOUT, JsonFile, check_result_file, print_table, write_result
from shoal.core.errors import RunError

if TYPE_CHECKING:
    from shoal.planner.tables.predict import Predicted
    from shoal.planner.tables.score import Score

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

_UNMEASURED = ("row", "line", "model", "metric", "predicted", "between", "")
_SHOWN = 10
"""Rows, and reasons, that are printed one by one."""

_Table = Annotated[Path, typer.Argument(metavar="FILE.csv", help="A table of runs, a row for each measured value.")]


def predict(table: _Table, json: JsonFile = None) -> None:
    """Predict every run of a table from its model, devices and plan, and compare with what was measured."""
    check_result_file(json)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.planner.tables.predict import predict_run
    from shoal.planner.tables.score import score, score_by_source, short_names
    from shoal.planner.tables.table import read_table

    rows = [predict_run(run) for run in read_table(table)]
    sources = score_by_source(rows)
    unmeasured = [row for row in rows if row.measured is None and row.predicted is not None]
    missing = [row for row in rows if row.predicted is None]
    rest = f"{'--json FILE' if json is None else 'the JSON' if json == STDOUT else json} has them"
    if any(row.measured is not None for row in rows):
        names = short_names(sources)
        lines = [_line(names[source], found) for source, found in sources.items()]
        print_table(_COLUMNS, [*lines, _line("all", score(rows))])
        print()
    _print_unmeasured(unmeasured, rest)
    _print_reasons("not predicted", [(row, row.why_not) for row in missing], table, rest)
    _print_reasons("predicted without what is not understood", [(row, row.odd) for row in rows if row.odd], table, rest)
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


def _print_unmeasured(rows: list["Predicted"], rest: str) -> None:
    """The predictions of rows that have nothing to compare with: they are all that such a row was given for."""
    if not rows:
        return
    print(f"predicted and not measured: {len(rows)} row(s), counted from 0")
    print_table(_UNMEASURED, [_prediction(row) for row in rows[:_SHOWN]])
    if len(rows) > _SHOWN:
        print(f"and {len(rows) - _SHOWN} more; {rest}")
    print()


def _prediction(row: "Predicted") -> tuple[object, ...]:
    low, high = row.interval or (0.0, 0.0)
    is_yes_or_no = row.metric == "oom"
    return (
        row.row,
        row.line,
        row.model,
        row.metric,
        ("yes" if row.predicted else "no") if is_yes_or_no else f"{row.predicted:.4g}",
        "" if is_yes_or_no else f"{low:.4g} to {high:.4g}",
        "in range" if row.in_range else f"out of range: {row.why_not}",
    )


def _print_reasons(what: str, reasoned: list[tuple["Predicted", str]], table: Path, rest: str) -> None:
    reasons = list(dict.fromkeys(reason for _, reason in reasoned))
    for reason in reasons[:_SHOWN]:
        alike = [row for row, other in reasoned if other == reason]
        print(
            f"{what}: {len(alike)} row(s), the first is row {alike[0].row}, counted from 0, line {alike[0].line} of "
            f"{table}: {reason}"
        )
    if len(reasons) > _SHOWN:
        print(f"and {len(reasons) - _SHOWN} more reasons; {rest}")


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
