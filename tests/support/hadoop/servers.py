"""HDFS (a name node and a data node) and a Hive metastore as processes on loopback, for as long as a block of code runs."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.hadoop.install import HDFS, HIVE, jars

_OPENS = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.util", "java.nio", "java.net", "java.io", "sun.nio.ch", "java.util.concurrent")
]
_LOG = """log4j.rootLogger=WARN,stderr
log4j.appender.stderr=org.apache.log4j.ConsoleAppender
log4j.appender.stderr.target=System.err
log4j.appender.stderr.layout=org.apache.log4j.PatternLayout
log4j.appender.stderr.layout.ConversionPattern=%p %c: %m%n
"""
# A property of Hadoop for each of them; ports of data nodes are found out by the name node.
_SITE = {
    "dfs.datanode.address": "127.0.0.1:0",
    "dfs.datanode.http.address": "127.0.0.1:0",
    "dfs.datanode.ipc.address": "127.0.0.1:0",
    "dfs.replication": "1",
    "dfs.permissions.enabled": "false",
    "dfs.webhdfs.enabled": "true",
    "dfs.safemode.extension": "0",
}


@dataclass(frozen=True, kw_only=True)
class Hdfs:
    """Addresses of a running HDFS, and the folder of its only data node."""

    native: str
    web: str
    data: Path


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def hdfs(folder: Path) -> Iterator[Hdfs]:
    """A name node and a data node with their files in ``folder``."""
    rpc, web = free_port(), free_port()
    (folder / "conf").mkdir(parents=True)
    for name in ("hdfs", "datanode"):
        # The daemons want pages that the package does not have; nobody looks at them.
        (folder / "pages" / "webapps" / name / "WEB-INF").mkdir(parents=True)
        (folder / "pages" / "webapps" / name / "WEB-INF" / "web.xml").write_text("<web-app/>")
    (folder / "conf" / "log4j.properties").write_text(_LOG)
    _write_site(folder / "conf" / "core-site.xml", {"fs.defaultFS": f"hdfs://127.0.0.1:{rpc}"})
    own = {
        "dfs.namenode.name.dir": f"file://{folder}/name",
        "dfs.datanode.data.dir": f"file://{folder}/data",
        "dfs.namenode.http-address": f"127.0.0.1:{web}",
    }
    _write_site(folder / "conf" / "hdfs-site.xml", _SITE | own)
    # Jersey of Spark is of another generation than the one that WebHDFS is written against.
    spark = [jar for jar in jars(HDFS) if not re.match(r"jersey-|spark-|javax\.ws\.rs", jar.name)]
    paths = [folder / "conf", folder / "pages", *jars("debian"), *spark]
    java = _java(paths, "-Xmx256m", f"-Dhadoop.home.dir={folder}")
    name_node = "org.apache.hadoop.hdfs.server.namenode.NameNode"
    data_node = "org.apache.hadoop.hdfs.server.datanode.DataNode"
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [*java, name_node, "-format", "-nonInteractive"], stdout=log, stderr=log, check=True, timeout=120
        )
    with _running([*java, name_node], folder / "namenode.log"), _running([*java, data_node], folder / "datanode.log"):
        _wait_for_data_node(f"http://127.0.0.1:{web}", folder)
        yield Hdfs(native=f"hdfs://127.0.0.1:{rpc}", web=f"webhdfs://127.0.0.1:{web}", data=folder / "data")


@contextmanager
def metastore(folder: Path, port: int) -> Iterator[str]:
    """A Hive metastore over Derby. It listens on every address: run it in a network namespace that has loopback only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conf").mkdir()
    own = {
        "javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/derby;create=true",
        "javax.jdo.option.ConnectionDriverName": "org.apache.derby.jdbc.EmbeddedDriver",
        "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": f"file://{folder}/warehouse",
        "hive.async.log.enabled": "false",
        "hive.metastore.event.db.notification.api.auth": "false",
    }
    _write_site(folder / "conf" / "hive-site.xml", own)
    java = _java([folder / "conf", *jars(HIVE)], "-Xmx400m", f"-Dderby.stream.error.file={folder}/derby.log")
    command = [*java, "org.apache.hadoop.hive.metastore.HiveMetaStore", "-p", str(port)]
    with _running(command, folder / "metastore.log"):
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited 120 s for the metastore: {(folder / 'metastore.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield f"hive://127.0.0.1:{port}"


def _java(paths: Sequence[Path], *options: str) -> list[str]:
    java = shutil.which("java")
    assert java is not None
    quick = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return [java, *quick, *_OPENS, *options, "-cp", ":".join(str(path) for path in paths)]


def _write_site(file: Path, values: dict[str, str]) -> None:
    lines = [f"<property><name>{name}</name><value>{value}</value></property>" for name, value in values.items()]
    file.write_text("<configuration>\n" + "\n".join(lines) + "\n</configuration>\n")


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)


def _wait_for_data_node(address: str, folder: Path) -> None:
    """Until the name node has a data node and has left its safe mode."""
    from shoal.data.storage.config import StorageConfig
    from shoal.data.storage.protocol import StorageError
    from shoal.data.storage.webhdfs import WebHdfsStorage

    storage = WebHdfsStorage(address.replace("http://", "webhdfs://"), StorageConfig(retries=0, timeout=10))
    deadline = time.monotonic() + 120
    while True:
        try:
            storage.replace("ready", b"yes")
            return
        except StorageError as error:
            if time.monotonic() > deadline:
                log = (folder / "namenode.log").read_text()[-2000:]
                raise TimeoutError(f"waited 120 s for HDFS, which says {error}: {log}") from error
        time.sleep(0.2)
