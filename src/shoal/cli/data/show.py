"""``shoal data show``: what a store of data consists of."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result
from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.data.store.reader import StoreReader

_Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder or address.")]
_Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="Which version; the newest when left out.")
]
_Unreferenced = Annotated[
    float | None,
    typer.Option(
        "--unreferenced", metavar="HOURS", min=0.0, help="List files that no version names and that are so old, too."
    ),
]


_Key = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="Show the rows that have this key, and nothing else.")
]


def show(
    store: _Store,
    version: _Version = None,
    key: _Key = None,
    unreferenced: _Unreferenced = None,
    json_file: JsonFile = None,
) -> None:
    """Show the versions, columns and splits of STORE. Sizes are checked, bytes are not: see verify."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.core.units import format_bytes
    from shoal.data.store.checks.unreferenced import find_unreferenced
    from shoal.data.store.folder import open_folder
    from shoal.data.store.reader import StoreReader
    from shoal.data.store.schema import describe_field
    from shoal.data.store.splits import list_splits, read_split

    folder = open_folder(store)
    manifest = folder.manifest(version)
    reader = StoreReader(folder, manifest)
    if key is not None:
        _show_key(reader, key, json_file)
        return
    versions = folder.versions()
    print(
        f"{folder.address}: version {manifest.version} of {versions[-1]}, {manifest.num_rows} rows in {manifest.num_blocks} "
        f"blocks, {format_bytes(manifest.num_bytes)}, key {manifest.key or 'none'}"
    )
    stats = reader.stats()
    rows = []
    for field in manifest.schema.fields:
        own = stats[field.name]
        rows.append(
            (describe_field(field), own.missing, _say(own.min), _say(own.max), _say(own.mean if own.finite else None))
        )
    print_table(("column", "missing", "min", "max", "mean"), rows)
    splits = {}
    for name in list_splits(folder):
        split = read_split(folder, name)
        splits[name] = {"version": split.version, "rows": {part: len(found) for part, found in split.parts.items()}}
        said = ", ".join(f"{part} {len(found)}" for part, found in split.parts.items())
        print(f"split {name} of version {split.version}: {said}")
    if manifest.source:
        print(f"taken in: {dict(manifest.source)}")
    result = {
        "store": folder.address,
        "version": manifest.version,
        "versions": versions,
        "rows": manifest.num_rows,
        "blocks": manifest.num_blocks,
        "bytes": manifest.num_bytes,
        "key": manifest.key,
        "row_hashes": f"{manifest.row_hashes:032x}",
        "columns": stats,
        "splits": splits,
        "source": dict(manifest.source),
    }
    if unreferenced is not None:
        left = find_unreferenced(folder, older_s=unreferenced * 3600)
        print(f"{len(left)} files that no version names, {format_bytes(sum(entry.size for entry in left))}")
        for entry in left:
            print(f"  /{entry.path}")
        result["unreferenced"] = [entry.path for entry in left]
    write_result(json_file, result)


def _show_key(reader: "StoreReader", said: str, json_file: JsonFile) -> None:
    """The rows with a key, by the index: of the store only their blocks are read."""
    name = reader.manifest.key
    kind = None if name is None else reader.manifest.schema[name].kind
    if kind is not None and kind.lstrip("<|")[0] in "iu":
        try:
            key: str | int = int(said)
        except ValueError:
            raise RequestError(f"--key {said}: column {name!r} is of whole numbers; give one") from None
    else:
        key = said
    numbers = reader.find_all(key)
    if not len(numbers):
        raise RequestError(
            f"--key {said}: no row of version {reader.version} of {reader.folder.address} has it in column {name!r}"
        )
    table = reader.read(numbers)
    rows = [
        {"row": int(number), **{column.field.name: _plain(column.value(place)) for column in table.columns}}
        for place, number in enumerate(numbers)
    ]
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))
    write_result(json_file, {"store": reader.folder.address, "version": reader.version, "key": key, "found": rows})


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes as hexadecimal digits, arrays as lists, times as text."""
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _say(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
