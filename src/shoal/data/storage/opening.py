"""From an address to the storage behind it."""

from pathlib import Path

from shoal.core.errors import RequestError
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.hdfs import HdfsStorage
from shoal.data.storage.local import LocalStorage
from shoal.data.storage.memory import open_memory
from shoal.data.storage.objects import ObjectStorage
from shoal.data.storage.other import FsspecStorage
from shoal.data.storage.protocol import Storage
from shoal.data.storage.web import WebStorage
from shoal.data.storage.webhdfs import WebHdfsStorage


def open_storage(address: str, settings: StorageConfig | None = None) -> tuple[Storage, str]:
    """The storage behind an address, and the path inside it that the address names. Nothing is asked of the store yet.

    An address is a path of this machine, or ``scheme://...``. A bare path is relative to the working directory.

    Raises:
        RequestError: the scheme is unknown, a package for it is not installed, or the address names no place in it.
    """
    found = settings or StorageConfig()
    scheme, separator, rest = address.partition("://")
    if not separator:
        if not address:
            raise RequestError("an empty address names no data; give a path or an address such as s3://bucket/folder")
        return _open_local(Path(address).expanduser().absolute(), found)
    if scheme in ("file", "local"):
        if not rest.startswith("/"):
            raise RequestError(f"{address!r} does not begin at the root; write file:///folder")
        return _open_local(Path(rest), found)
    if scheme == "memory":
        name, _, path = rest.strip("/").partition("/")
        return open_memory(name), path
    host, _, path = rest.partition("/")
    if scheme == "hive":
        raise RequestError(
            f'{address!r} is a table of a metastore and no place for files; it is read as data.path of source = "table" and by '
            "shoal data build, and a store is read from its own folder or address"
        )
    if not host:
        raise RequestError(
            f"{address!r} has nothing behind {scheme}://; name a place there, such as {scheme}://host/path"
        )
    return _open_remote(scheme, f"{scheme}://{host}", found), path.strip("/")


def _open_remote(scheme: str, base: str, settings: StorageConfig) -> Storage:
    if scheme in ("http", "https"):
        return WebStorage(base, settings)
    if scheme in ("s3", "s3a", "gs", "az"):
        return ObjectStorage(base, settings)
    if scheme == "hdfs":
        return HdfsStorage(base, settings)
    if scheme in ("webhdfs", "swebhdfs"):
        return WebHdfsStorage(base, settings)
    return FsspecStorage(base, settings)


def _open_local(full: Path, settings: StorageConfig) -> tuple[Storage, str]:
    normal = Path(*[part for part in full.parts if part != "."])
    if ".." in normal.parts:
        normal = normal.resolve()
    return LocalStorage(Path("/"), settings), str(normal).lstrip("/")
