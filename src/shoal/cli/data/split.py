"""``shoal data split``: how rows of files would be divided, with the proof, and the divided rows as files."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder, a pattern or an address.")]
_By = Annotated[str, typer.Option("--by", help="rows, time, user, item, key, label, behaviour or hash.")]
_Key = Annotated[str | None, typer.Option("--key", metavar="COLUMN", help="The column that is meant.")]
_Gap = Annotated[str, typer.Option("--gap", help="With --by time: a number, or 36h, 7d.")]
_Share = Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of the rows.")]
_Heavy = Annotated[bool, typer.Option("--split-heavy", help="A key too heavy for a side may be on several.")]
_Sort = Annotated[bool, typer.Option("--sort", help="Sort clocks that go back in place of refusing them.")]
_Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write the numbers of each side's rows there, NAME.npy, and cut.json."),
]
_Format = Annotated[str | None, typer.Option("--format", help="Of the files; guessed when left out.")]


def split(
    source: _Source,
    by: _By = "rows",
    key: _Key = None,
    gap: _Gap = "0",
    validation: _Share = 0.05,
    test: _Share = 0.05,
    split_heavy: _Heavy = False,
    sort: _Sort = False,
    out: _Out = None,
    format: _Format = None,
    json_file: JsonFile = None,
) -> None:
    """Divide the rows of SRC into train, validation and test, and print the balance and the proof."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    import json

    import numpy as np

    from shoal.core.config import validate
    from shoal.core.errors import RequestError
    from shoal.data.formats.opening import open_data
    from shoal.data.formats.options import ReadOptions
    from shoal.data.partition.config import CutConfig
    from shoal.data.partition.cut import columns_of, cut_table
    from shoal.data.table import concat_tables

    if validation + test >= 1:
        raise RequestError(
            f"--validation {validation:g} and --test {test:g} leave nothing for training; make their sum less than 1"
        )
    tables: dict[str, object] = {
        "by": by,
        "key": key,
        "split_heavy": split_heavy,
        "backwards": "sort" if sort else "refuse",
    }
    tables["gap"] = float(gap) if gap.replace(".", "", 1).isdigit() else gap
    config = validate(CutConfig, tables, origin="shoal data split")
    opened = open_data(source, format=format)
    names = columns_of(config)
    if names and all(name in opened.schema.names for name in names):
        opened = open_data(source, format=format, options=ReadOptions(columns=names))
    found = list(opened.tables())
    if not sum(map(len, found)):
        raise RequestError(f"{source} has 0 rows; there is nothing to divide")
    cut = cut_table(concat_tables(found), config, validation=validation, test=test, where=source)
    for line in cut.certificate.lines():
        print(line)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in cut.rows.items():
            np.save(out / f"{name}.npy", rows)
        (out / "cut.json").write_text(json.dumps(cut.certificate.as_values(), indent=2) + "\n")
    write_result(json_file, {"source": source, "files": len(opened.files), **cut.certificate.as_values()})
