"""Tables of a Hive metastore: ``hive://db.table`` is looked up, and what is read are the files in its folders.

The metastore knows where a table lies, its columns and its partitions; it has none of the data. It is asked over thrift by the
client of ``pymetastore``, with a deadline.
"""

from dataclasses import dataclass
from typing import Any

from shoal.core.errors import RequestError
from shoal.data.storage.attempts import Attempts, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import Missing
from shoal.data.storage.timebox import within

_PORT = 9083
_COMMA = ","
_FORMATS = {
    "parquet": "parquet",
    "orc": "orc",
    "json": "jsonl",
    "avro": "avro",
    "sequencefile": "sequence",
    "text": "csv",
}


@dataclass(frozen=True, kw_only=True)
class HiveColumn:
    """A column as the metastore has it."""

    name: str
    kind: str
    """Hive's word, such as ``bigint`` or ``array<string>``."""


@dataclass(frozen=True, kw_only=True)
class HivePartition:
    """A folder whose rows all have these values in the partition columns."""

    values: tuple[str, ...]
    location: str


@dataclass(frozen=True, kw_only=True)
class HiveTable:
    """Where a table lies and how it is divided."""

    location: str
    """Address of its folder."""
    columns: tuple[HiveColumn, ...]
    """Those that are in the files."""
    partition_columns: tuple[HiveColumn, ...]
    """Those that are in the folders' names."""
    partitions: tuple[HivePartition, ...]
    """In the order of their values; none where the table has no partition columns."""
    format: str
    """parquet, orc, csv, jsonl, avro, sequence; or the name of Hive's input format where it is another."""
    delimiter: str | None
    """Between the fields of a text table."""
    skip_lines: int = 0
    """At the beginning of each file of a text table."""
    quotes: bool = False
    """Fields of a text table may be in quotes."""


def resolve_hive(address: str, settings: StorageConfig | None = None) -> HiveTable:
    """What the metastore says of ``hive://db.table`` or ``hive://host:port/db.table``.

    Without a host it is that of ``options.metastore``, such as ``thrift://host:9083``, and this machine where there is none.

    Raises:
        RequestError: the address names no table, or ``pymetastore`` is not installed.
        Missing: there is no such table.
        Unreachable: the metastore did not answer.
    """
    found = settings or StorageConfig()
    host, port, database, table = _parse(address, found)
    where = f"hive://{host}:{port}"

    def ask() -> HiveTable:
        try:
            return within(found.timeout, lambda: _ask(host, port, database, table, found.timeout))
        except (Missing, RequestError, Transient):
            raise
        except Exception as error:
            raise Transient(f"{type(error).__name__}: {error}") from error

    return Attempts(where, found).run("asking the metastore", f"{database}.{table}", ask)


def _parse(address: str, settings: StorageConfig) -> tuple[str, int, str, str]:
    rest = address.removeprefix("hive://").strip("/")
    host, slash, name = rest.rpartition("/")
    if not slash:
        host = settings.options.get("metastore", "").removeprefix("thrift://").strip("/") or "localhost"
    database, _, table = name.rpartition(".")
    server, _, port = host.partition(":")
    if not table or "/" in host or (port and not port.isdigit()):
        raise RequestError(
            f"{address!r} names no table; write hive://database.table or hive://host:port/database.table"
        )
    return server, int(port or _PORT), database or "default", table


def _ask(host: str, port: int, database: str, table: str, timeout: float) -> HiveTable:
    try:
        from pymetastore.hive_metastore import ThriftHiveMetastore
        from pymetastore.hive_metastore.ttypes import NoSuchObjectException
        from thrift.protocol.TBinaryProtocol import TBinaryProtocol
        from thrift.transport import TSocket, TTransport
    except ImportError:
        raise RequestError("hive:// needs pymetastore: pip install 'shoal[hdfs]'") from None
    socket = TSocket.TSocket(host, port)
    socket.setTimeout(1000 * timeout)
    transport = TTransport.TBufferedTransport(socket)
    transport.open()
    try:
        client: Any = ThriftHiveMetastore.Client(TBinaryProtocol(transport))
        try:
            held = client.get_table(database, table)
        except NoSuchObjectException:
            known = ", ".join(client.get_all_tables(database)[:10]) or "none"
            raise Missing(
                f"hive://{host}:{port}/{database}.{table}: there is no such table; {database} has {known}",
                address=f"hive://{host}:{port}",
                path=f"{database}.{table}",
            ) from None
        keys = held.partitionKeys or []
        parts = client.get_partitions(database, table, -1) if keys else []
    finally:
        transport.close()
    partitions = [HivePartition(values=tuple(part.values), location=_address(part.sd.location)) for part in parts]
    serde = held.sd.serdeInfo
    said, is_quoted = serde.parameters or {}, "csv" in (serde.serializationLib or "").lower()
    return HiveTable(
        location=_address(held.sd.location),
        columns=tuple(HiveColumn(name=each.name, kind=each.type) for each in held.sd.cols),
        partition_columns=tuple(HiveColumn(name=each.name, kind=each.type) for each in keys),
        partitions=tuple(sorted(partitions, key=lambda part: part.values)),
        format=_format(held.sd.inputFormat or "", serde.serializationLib or ""),
        delimiter=said.get("field.delim") or said.get("separatorChar") or (_COMMA if is_quoted else None),
        skip_lines=int(skip) if (skip := (held.parameters or {}).get("skip.header.line.count", "")).isdigit() else 0,
        quotes=is_quoted,
    )


def _address(location: str) -> str:
    """Java writes ``file:/folder`` for what everybody else writes with three slashes."""
    scheme, colon, path = location.partition(":/")
    return f"{scheme}:///{path}" if colon and not path.startswith("/") else location


def _format(input_format: str, serde: str) -> str:
    # A JSON table is a text table by its input format, so the class that takes its rows apart is asked first.
    words = f"{serde} {input_format}".lower()
    return next((ours for theirs, ours in _FORMATS.items() if theirs in words), input_format)
