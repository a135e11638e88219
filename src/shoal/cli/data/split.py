"""``shoal data split``: how rows would be divided, with the proof; the divided rows as files, or as a split of their store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result

if TYPE_CHECKING:
    from shoal.cli.data.opening import Given
    from shoal.data.partition.cut import Cut

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder, a pattern, an address or a store.")]
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
_Save = Annotated[
    str | None,
    typer.Option("--save", metavar="NAME", help="Keep it in the store SRC, for data.split = NAME of a recipe."),
]
_Type = Annotated[
    list[str] | None, typer.Option("--type", metavar="COLUMN=TYPE", help="Type of a column; may be given again.")
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
    save: _Save = None,
    format: _Format = None,
    type: _Type = None,
    json_file: JsonFile = None,
) -> None:
    """Divide the rows of SRC into train, validation and test, and print the balance and the proof."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    import json

    import numpy as np

    from shoal.cli.data.opening import open_given
    from shoal.core.config import validate
    from shoal.core.errors import RequestError
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
    given = open_given(source, format=format, types=type or (), columns=columns_of(config) or None)
    if save is not None and given.store is None:
        raise RequestError(
            f"--save keeps a split in a store, and {source} is none; leave it out, or build one of it first"
        )
    found = list(given.tables())
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
    if save is not None:
        _save(given, save, cut)
    write_result(json_file, {"source": source, "files": given.files, **cut.certificate.as_values()})


def _save(given: "Given", name: str, cut: "Cut") -> None:
    from shoal.data.store.selection import RowSelection
    from shoal.data.store.splits import Split, write_split

    assert given.store is not None and given.version is not None
    parts = {part: RowSelection.of(rows) for part, rows in cut.rows.items() if len(rows)}
    about = cut.certificate.as_values()
    split = Split(name=name, version=given.version, num_rows=cut.certificate.total, parts=parts, about=about)
    write_split(given.store, split)
    print(f"kept as split {name} of version {given.version}")
