"""``shoal data build``: files made to a store, in parallel, and gone on with where it was killed."""

import os
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, log, write_result
from shoal.core.errors import RequestError

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder or an address of data.")]
_Target = Annotated[str, typer.Argument(metavar="DST", help="The folder or address of the store to make.")]
_Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help="What SRC is: csv, jsonl, parquet, tokens, ...; by its names when left out."
    ),
]
_Key = Annotated[str | None, typer.Option("--key", metavar="COLUMN", help="The column that rows are found by.")]
_Codec = Annotated[
    str, typer.Option("--codec", metavar="none|zstd", help="none is mapped into memory, zstd is smaller.")
]
_BlockBytes = Annotated[
    int, typer.Option("--block-bytes", metavar="N", help="Bytes of a block, about; more rows in one compress better.")
]
_Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; one per core when left out.")
]
_Dtype = Annotated[str, typer.Option("--dtype", metavar="TYPE", help="Of raw token ids; a .npy file says its own.")]
_Columns = Annotated[
    str | None, typer.Option("--columns", metavar="A,B", help="These columns of files of rows only; all when left out.")
]
_Type = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="COLUMN=TYPE", help="Type of a column, such as when=time; may be given again."),
]
_Append = Annotated[bool, typer.Option("--append", help="Add the rows to the store at DST, as its next version.")]


def build(
    source: _Source,
    target: _Target,
    format: _Format = None,
    key: _Key = None,
    codec: _Codec = "none",
    block_bytes: _BlockBytes = 1 << 20,
    workers: _Workers = None,
    dtype: _Dtype = "uint16",
    columns: _Columns = None,
    type: _Type = None,
    append: _Append = False,
    json_file: JsonFile = None,
) -> None:
    """Make a store at DST out of the data at SRC. Killed and run again, it goes on where it was."""
    check_result_file(json_file)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.data.opening import read_types
    from shoal.core.units import format_bytes
    from shoal.data.formats.options import ReadOptions
    from shoal.data.store.blockwriter import BlockOptions
    from shoal.data.store.building.incoming import open_units
    from shoal.data.store.folder import open_folder
    from shoal.data.store.writer import BuildOptions, append_units, build_store

    block = BlockOptions(target_bytes=block_bytes, codec=codec)
    if append and key is not None:
        raise RequestError("--key is chosen where the store is built; leave it out with --append")
    like = open_folder(target).manifest().schema if append else None
    read = ReadOptions(like=like, types=read_types(type or ()), columns=tuple(columns.split(",")) if columns else None)
    units, schema = open_units(source, format=format, dtype=dtype, options=read)
    if append:
        manifest = append_units(units, target, block=block)
    else:
        options = BuildOptions(block=block, key=key, workers=workers or os.cpu_count() or 1)
        total = len(units)
        manifest = build_store(
            units, target, options=options, schema=schema, on_done=lambda done: log(f"{done} of {total} parts done")
        )
    print(
        f"{target}: version {manifest.version}, {manifest.num_rows} rows in {manifest.num_blocks} blocks, "
        f"{format_bytes(manifest.num_bytes)}"
    )
    write_result(
        json_file,
        {
            "store": target,
            "version": manifest.version,
            "rows": manifest.num_rows,
            "blocks": manifest.num_blocks,
            "bytes": manifest.num_bytes,
            "digest": manifest.digest,
        },
    )
