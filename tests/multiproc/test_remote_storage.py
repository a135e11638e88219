"""Stores as they really are: S3 by moto's server, HDFS with its daemons, a Hive metastore. Each is a process on loopback.

None of them is installed by `make install`; where one is missing its test says what fetches it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import RequestError, ShoalError
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import Unreachable, WrongBytes
from support.data.contract import CONTENT, check_storage
from support.hadoop.install import what_is_missing
from support.hadoop.servers import Hdfs, hdfs

pytestmark = pytest.mark.timeout(400)
slow_start = pytest.mark.soak
"""Daemons of Java, or a server in Python: tens of seconds."""
SETTINGS = StorageConfig(retries=2, timeout=20, backoff=0.01)


@pytest.fixture(scope="module")
def s3() -> Iterator[StorageConfig]:
    for name in ("moto", "flask", "flask_cors", "obstore"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install 'moto[s3]' flask flask-cors obstore")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "endpoint": f"http://{host}:{port}",
        "region": "us-east-1",
        "access_key_id": "x",
        "secret_access_key": "y",
    }
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )
    client.create_bucket(Bucket="bucket")
    client.close()
    yield StorageConfig(options=options, retries=2, timeout=20, backoff=0.01)
    server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    if importlib.util.find_spec("hdfs_native") is None:
        pytest.skip("needs hdfs-native: pip install 'shoal[hdfs]'")
    with hdfs(tmp_path_factory.mktemp("hdfs") / "run") as found:
        yield found


@slow_start
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_s3(s3: StorageConfig) -> None:
    storage, path = open_storage("s3://bucket/some/folder", s3)
    assert path == "some/folder"
    check_storage(storage, path)
    with pytest.raises(ShoalError, match="bucket2"):
        open_storage("s3://bucket2/x", s3)[0].read("x")


@slow_start
@pytest.mark.parametrize("kind", ["native", "web"])
def test_hdfs(cluster: Hdfs, kind: str) -> None:
    storage, path = open_storage(f"{getattr(cluster, kind)}/some/{kind}", SETTINGS)
    check_storage(storage, path)


@slow_start
def test_a_byte_that_was_flipped_on_the_data_node_is_refused(cluster: Hdfs) -> None:
    storage, _ = open_storage(f"{cluster.native}/x", SETTINGS)
    # Of a length that no other test's files have: blocks of deleted ones lie about for a while.
    storage.create("flip/a.bin", CONTENT[:-77])
    blocks = [file for file in cluster.data.rglob("blk_*") if file.stat().st_size == len(CONTENT) - 77]
    (block,) = blocks
    data = bytearray(block.read_bytes())
    data[1_200_000] ^= 4
    block.write_bytes(data)
    with pytest.raises((WrongBytes, Unreachable), match=r"flip/a.bin"):
        storage.read("flip/a.bin", 1_100_000, 1_300_000)
    assert storage.read("flip/a.bin", 0, 1000) == CONTENT[:1000]


def test_nobody_there() -> None:
    pytest.importorskip("hdfs_native", reason="needs hdfs-native: pip install 'shoal[hdfs]'")
    for address in ("hdfs://127.0.0.1:9/x", "webhdfs://127.0.0.1:9/x"):
        settings = StorageConfig(retries=1, timeout=3, deadline=10, backoff=0.01)
        with pytest.raises((Unreachable, RequestError), match=r"127\.0\.0\.1:9"):
            open_storage(address, settings)[0].read("x")


@slow_start
def test_tables_of_a_hive_metastore(tmp_path: Path) -> None:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    if importlib.util.find_spec("pymetastore") is None:
        pytest.skip("needs pymetastore: pip install 'shoal[hdfs]'")
    tests = Path(__file__).parents[1]
    command = f"ip link set lo up && exec {sys.executable} -m support.hadoop.hivesession {tmp_path}"
    found = subprocess.run(
        ["unshare", "--net", "sh", "-c", command],
        capture_output=True,
        text=True,
        cwd=tests,
        env=dict(os.environ),
        timeout=300,
    )
    if "Operation not permitted" in found.stderr:
        pytest.skip("a network namespace cannot be made here, and the metastore listens on every address")
    assert found.returncode == 0, found.stderr[-3000:]
    said = json.loads(found.stdout.splitlines()[-1])
    events, plain = said["events"], said["plain"]
    assert events["location"] == f"file://{tmp_path}/warehouse/events"
    assert events["format"] == "parquet"
    assert [(each["name"], each["kind"]) for each in events["columns"]] == [("id", "bigint"), ("text", "string")]
    assert [(each["name"], each["kind"]) for each in events["partition_columns"]] == [
        ("day", "string"),
        ("hour", "int"),
    ]
    assert [part["values"] for part in events["partitions"]] == [
        ["2026-11-01", "0"],
        ["2026-11-01", "1"],
        ["2026-11-02", "1"],
    ]
    days = (("2026-11-01", "0"), ("2026-11-01", "1"), ("2026-11-02", "1"))
    assert said["contents"] == [[f"{day} {hour}", day, hour] for day, hour in days], "the rows, as training reads them"
    assert said["texts"] == [7, 8]
    assert (plain["format"], plain["delimiter"], plain["partitions"]) == ("csv", "|", [])
    assert "default.nosuch: there is no such table; default has" in said["missing"]
