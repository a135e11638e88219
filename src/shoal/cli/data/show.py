"""``shoal data show``: what a store of data consists of."""

from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result

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


def show(
    store: _Store, version: _Version = None, unreferenced: _Unreferenced = None, json_file: JsonFile = None
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


def _say(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
