"""``shoal data stats``: what the columns of some files, or of a store, hold."""

from typing import Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder, a pattern, an address or a store.")]
_Format = Annotated[str | None, typer.Option("--format", help="Of the files; guessed when left out.")]
_Type = Annotated[
    list[str] | None, typer.Option("--type", metavar="COLUMN=TYPE", help="Type of a column; may be given again.")
]


def stats(source: _Source, format: _Format = None, type: _Type = None, json_file: JsonFile = None) -> None:
    """Print type, missing values, range, mean and deviation of every column of SRC. All rows are read, a batch at a time."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.data.opening import open_given
    from shoal.data.stats import describe_tables

    given = open_given(source, format=format, types=type or ())
    found = describe_tables(given.schema, given.tables())
    print(f"{source}: {found.num_rows} rows in {given.what}")
    rows = [
        (
            one.name,
            one.kind,
            one.missing,
            one.nan or "",
            _say(one.least),
            _say(one.most),
            _say(one.mean),
            _say(one.deviation),
        )
        for one in found.columns
    ]
    print_table(("column", "type", "missing", "nan", "least", "most", "mean", "deviation"), rows)
    write_result(json_file, {"source": source, "format": given.format, **found.as_values()})


def _say(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
