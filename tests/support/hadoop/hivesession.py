"""A Hive metastore with one partitioned table and one plain one, asked by ``resolve_hive``; prints what it said as JSON.

Run in a network namespace of its own, because the metastore listens on every address.
"""

import dataclasses
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
from pymetastore.hive_metastore import ThriftHiveMetastore
from pymetastore.hive_metastore.ttypes import FieldSchema, Partition, SerDeInfo, StorageDescriptor, Table
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.transport import TSocket, TTransport

from shoal.data.formats.opening import open_data
from shoal.data.formats.options import ReadOptions
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.hive import resolve_hive
from shoal.data.storage.protocol import Missing
from shoal.data.table import concat_tables
from support.hadoop.servers import free_port, metastore

_PARQUET = (
    "org.apache.hadoop.hive.ql.io.parquet.MapredParquetInputFormat",
    "org.apache.hadoop.hive.ql.io.parquet.MapredParquetOutputFormat",
    "org.apache.hadoop.hive.ql.io.parquet.serde.ParquetHiveSerDe",
)
_TEXT = (
    "org.apache.hadoop.mapred.TextInputFormat",
    "org.apache.hadoop.hive.ql.io.HiveIgnoreKeyTextOutputFormat",
    "org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe",
)


def _described(location: Path, formats: tuple[str, str, str], **parameters: str) -> StorageDescriptor:
    reads, writes, serde = formats
    return StorageDescriptor(
        cols=[FieldSchema(name="id", type="bigint"), FieldSchema(name="text", type="string")],
        location=f"file://{location}",
        inputFormat=reads,
        outputFormat=writes,
        numBuckets=-1,
        serdeInfo=SerDeInfo(name="s", serializationLib=serde, parameters=parameters),
        parameters={},
        bucketCols=[],
        sortCols=[],
    )


def _make(port: int, folder: Path) -> None:
    transport = TTransport.TBufferedTransport(TSocket.TSocket("127.0.0.1", port))
    transport.open()
    client = ThriftHiveMetastore.Client(TBinaryProtocol(transport))
    times = {"createTime": 1, "lastAccessTime": 1, "parameters": {}}
    keys = [FieldSchema(name="day", type="string"), FieldSchema(name="hour", type="int")]
    place = folder / "warehouse" / "events"
    table = Table(
        tableName="events",
        dbName="default",
        owner="o",
        sd=_described(place, _PARQUET),
        partitionKeys=keys,
        retention=0,
        tableType="MANAGED_TABLE",
        **times,
    )
    client.create_table(table)
    for day, hour in (("2026-11-02", "1"), ("2026-11-01", "0"), ("2026-11-01", "1")):
        part = place / f"day={day}" / f"hour={hour}"
        part.mkdir(parents=True)
        pyarrow.parquet.write_table(
            pyarrow.table({"id": [int(hour)], "text": [f"{day} {hour}"]}), part / "rows.parquet"
        )
        held = Partition(
            values=[day, hour], dbName="default", tableName="events", sd=_described(part, _PARQUET), **times
        )
        client.add_partition(held)
    plain = Table(
        tableName="plain",
        dbName="default",
        owner="o",
        sd=_described(folder / "plain", _TEXT, **{"field.delim": "|"}),
        partitionKeys=[],
        retention=0,
        tableType="EXTERNAL_TABLE",
        **times,
    )
    client.create_table(plain)
    transport.close()


def main() -> None:
    """Start, fill, ask, print."""
    folder = Path(sys.argv[1])
    port = free_port()
    settings = StorageConfig(options={"metastore": f"thrift://127.0.0.1:{port}"}, retries=1)
    with metastore(folder / "metastore", port) as address:
        _make(port, folder)
        events = resolve_hive(f"{address}/default.events")
        rows = concat_tables(list(open_data(f"{address}/default.events").tables()))
        contents = [[str(rows[name].value(row)) for name in ("text", "day", "hour")] for row in range(rows.num_rows)]
        (folder / "plain").mkdir(exist_ok=True)  # The metastore makes it.
        (folder / "plain" / "000000_0").write_text("7|a\n8|\\N\n")
        texts = concat_tables(list(open_data("hive://default.plain", options=ReadOptions(storage=settings)).tables()))
        try:
            resolve_hive("hive://nosuch", settings)
            said = "found"
        except Missing as error:
            said = str(error)
        plain = resolve_hive("hive://default.plain", settings)
        found = {"events": dataclasses.asdict(events), "plain": dataclasses.asdict(plain)}
        print(json.dumps(found | {"contents": contents, "missing": said, "texts": texts["id"].values.tolist()}))


if __name__ == "__main__":
    main()
