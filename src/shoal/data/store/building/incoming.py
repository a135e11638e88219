"""From the address of data to the units that a build shares out among processes.

Small files go together and a large one stays alone, by their sizes and in their order: the same units on every machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.core.errors import RequestError
from shoal.data.formats.files import DataFile
from shoal.data.formats.opening import Opened, open_data
from shoal.data.formats.options import ReadOptions
from shoal.data.store.building.tokenfiles import token_units
from shoal.data.store.building.units import Unit
from shoal.data.table import Schema, Table

UNIT_BYTES = 1 << 26
"""Of the files of one unit, about."""


def open_units(
    address: str,
    *,
    format: str | None = None,
    dtype: str = "uint16",
    options: ReadOptions | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[Sequence[Unit], Schema]:
    """The units of some data and their columns.

    Args:
        address: a file, a folder, a pattern or an address.
        format: what it is; by the names of its files when left out.
        dtype: of raw token ids.
        options: how files are read.
        unit_bytes: of the files of one unit.

    Raises:
        RequestError: there is no such data, its format is unknown, or its files have different columns.
    """
    if format == "tokens" or (format is None and address.endswith((".npy", ".bin"))):
        return token_units(address, dtype=dtype, unit_bytes=unit_bytes)
    opened = open_data(address, format=format, options=options)
    if opened.format == "tokens":
        raise RequestError(f"{address} is a folder of token files; build one store of each, or join them to one file")
    if opened.format == "images":
        # What a picture's label is depends on all folders.
        return [_unit(opened, address)], opened.schema
    return [
        _unit(replace(opened, files=files), _name(files)) for files in _group(opened.files, unit_bytes)
    ], opened.schema


def _group(files: Sequence[DataFile], unit_bytes: int) -> Iterator[tuple[DataFile, ...]]:
    group: list[DataFile] = []
    size = 0
    for file in files:
        if group and size + file.num_bytes > unit_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.num_bytes
    if group:
        yield tuple(group)


def _name(files: Sequence[DataFile]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _unit(opened: Opened, name: str) -> Unit:
    versions = [file.storage.stat(file.path).version for file in opened.files]
    names = [file.name for file in opened.files]

    def read() -> Iterator[Table]:
        return opened.tables()

    return Unit(
        name=name, open=read, fingerprint=repr((names, versions, opened.options.columns, dict(opened.options.types)))
    )
