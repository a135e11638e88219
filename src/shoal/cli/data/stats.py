"""``shoal data stats``: what the columns of some files hold."""

from typing import Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder, a pattern or an address.")]
_Format = Annotated[str | None, typer.Option("--format", help="Of the files; guessed when left out.")]


def stats(source: _Source, format: _Format = None, json_file: JsonFile = None) -> None:
    """Print type, missing values, range, mean and deviation of every column of SRC. All rows are read, a batch at a time."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.data.formats.opening import open_data
    from shoal.data.stats import describe_tables

    opened = open_data(source, format=format)
    found = describe_tables(opened.schema, opened.tables())
    print(f"{source}: {found.num_rows} rows in {len(opened.files)} {opened.format} file(s)")
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
    write_result(json_file, {"source": source, "format": opened.format, **found.as_values()})


def _say(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
