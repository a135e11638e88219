"""Addresses: which storage answers, what is missing, and schemes of fsspec."""

import importlib.util
import os
import subprocess
import sys

import pytest

from shoal.core.errors import RequestError
from shoal.data.storage.opening import open_storage
from shoal.data.storage.other import FsspecStorage
from shoal.data.storage.protocol import AlreadyThere, Missing, Truncated


def test_a_scheme_of_fsspec() -> None:
    storage = FsspecStorage("memory://opening", open_settings())
    storage.create("a/x", b"0123")
    assert storage.read("a/x", 1, 3) == b"12"
    assert storage.read("a/x") == b"0123"
    assert [entry.path for entry in storage.list("")] == ["a/x"]
    with pytest.raises(AlreadyThere):
        storage.create("a/x", b"4")
    with pytest.raises(Truncated, match="ends at byte 4"):
        storage.read("a/x", 0, 5)
    storage.replace("a/x", b"new")
    assert storage.read("a/x") == b"new"
    storage.delete("a/x")
    storage.delete("a/x")
    with pytest.raises(Missing):
        storage.stat("a/x")


def open_settings():  # type: ignore[no-untyped-def]
    from shoal.data.storage.config import StorageConfig

    return StorageConfig(retries=0)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hive://db.table", "table of a metastore"),
        ("s3:///key", "nothing behind s3://"),
        ("nosuch://host/x", "nobody knows nosuch://"),
    ],
)
def test_wrong_addresses(address: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        open_storage(address)


@pytest.mark.parametrize(
    ("address", "module", "extra"),
    [("s3://bucket/x", "obstore", "s3"), ("hdfs://127.0.0.1:9/x", "hdfs_native", "hdfs")],
)
def test_a_package_that_is_missing_is_named(
    address: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RequestError, match=rf"pip install 'shoal\[{extra}\]'"):
        open_storage(address)


def test_opening_a_folder_imports_no_client() -> None:
    code = (
        "import sys; from shoal.data.storage.opening import open_storage; open_storage('/tmp/x'); "
        "print([n for n in ('torch', 'fsspec', 'obstore', 'hdfs_native', 'pymetastore', 'pyarrow') if n in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert found.stdout.strip() == "[]"
    assert importlib.util.find_spec("fsspec") is not None
