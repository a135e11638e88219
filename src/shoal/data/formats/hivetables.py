"""A table of a Hive metastore as files: where they lie, in which format, and how their rows are read.

The metastore says what the files do not: which folders are partitions (they may lie anywhere), the types of the columns, and for
tables of text that there is no header line, what stands between two fields and what a missing value looks like.
"""

from collections.abc import Mapping
from dataclasses import replace

from shoal.core.errors import RequestError
from shoal.data.formats.files import HIVE_MISSING, DataFile, find_files
from shoal.data.formats.options import ReadOptions
from shoal.data.storage.hive import HiveColumn, HiveTable

FORMATS = ("parquet", "csv", "jsonl")
_FIELD = "\x01"
"""Between two fields of a text table that names nothing else."""
_NULL = "\\N"
_KINDS = {
    "tinyint": "i1",
    "smallint": "i2",
    "int": "i4",
    "integer": "i4",
    "bigint": "i8",
    "float": "f4",
    "double": "f8",
    "decimal": "f8",
    "boolean": "bool",
    "string": "text",
    "varchar": "text",
    "char": "text",
    "timestamp": "time",
    "date": "time",
}


def hive_files(table: HiveTable, address: str, options: ReadOptions, pattern: str | None = None) -> list[DataFile]:
    """The files of a table, partition by partition, with the values of the partition columns.

    Args:
        table: as the metastore has it.
        address: of the table, for messages.
        options: how storages are asked.
        pattern: which files of a folder.

    Raises:
        RequestError: the table has no partition, or no file.
    """
    names = [column.name for column in table.partition_columns]
    if not names:
        return find_files(table.location, pattern, options.storage)
    found = []
    for part in table.partitions:
        keys = {name: None if value == HIVE_MISSING else value for name, value in zip(names, part.values, strict=True)}
        # A partition that was added and not written to yet has no folder.
        files = find_files(part.location, pattern, options.storage, may_be_empty=True)
        found += [replace(file, keys=keys) for file in files]
    if not found:
        raise RequestError(
            f"data.path: {address} has {len(table.partitions)} partitions and no file in them; write some rows, or is the "
            "folder another one than the metastore says?"
        )
    return found


def hive_options(table: HiveTable, address: str, options: ReadOptions) -> tuple[str, ReadOptions]:
    """The format of a table's files, and how they are read; what the recipe says of types counts before the metastore.

    Raises:
        RequestError: files of this format are not read here.
    """
    if table.format not in FORMATS:
        raise RequestError(
            f"{address} has files of the format {table.format}, and read are {', '.join(FORMATS)}; write the table as Parquet "
            "(CREATE TABLE ... STORED AS PARQUET AS SELECT ...)"
        )
    said = dict(_kinds(table.partition_columns))
    if table.format != "parquet":
        said |= _kinds(table.columns)
    options = replace(options, types={**said, **options.types})
    if table.format != "csv":
        return table.format, options
    return "csv", replace(
        options,
        header=tuple(column.name for column in table.columns),
        skip_lines=table.skip_lines,
        delimiter=options.delimiter or table.delimiter or _FIELD,
        missing=(_NULL, "") if options.missing == ("",) else options.missing,
        quotes=table.quotes,
    )


def _kinds(columns: tuple[HiveColumn, ...]) -> Mapping[str, str]:
    found = {}
    for column in columns:
        word = column.kind.partition("(")[0].strip().lower()
        if word in _KINDS:
            found[column.name] = _KINDS[word]
    return found
