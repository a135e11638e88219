"""Files of a web server that answers late, by half, wrongly or not at all, and then recovers."""

import random
import time
from collections.abc import Iterator

import pytest

from shoal.core.errors import RequestError
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import Missing, Truncated, Unreachable
from shoal.data.storage.web import WebStorage
from support.data.webserver import Web, serving

CONTENT = random.Random(1).randbytes(300_000)
QUICK = StorageConfig(timeout=2, deadline=30, retries=3, backoff=0.001)


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    found.files = {"a/b.bin": CONTENT, "empty": b""}
    with serving(found):
        yield found


def _storage(web: Web, settings: StorageConfig = QUICK) -> WebStorage:
    storage, path = open_storage(f"{web.address}/a/b.bin", settings)
    assert path == "a/b.bin"
    assert isinstance(storage, WebStorage)
    return storage


def test_reads_are_exact(web: Web) -> None:
    storage = _storage(web)
    assert storage.read("a/b.bin") == CONTENT
    assert storage.read("a/b.bin", 100, 228) == CONTENT[100:228]
    assert storage.read("a/b.bin", 299_990) == CONTENT[-10:]
    assert storage.read("a/b.bin", 300_000) == b""
    assert storage.read("a/b.bin", 5, 5) == b""
    assert storage.read("empty") == b""
    assert storage.stat("a/b.bin").size == 300_000
    assert storage.stat("a/b.bin").version == '"1"'
    web.has_ranges = False
    assert storage.read("a/b.bin", 100, 228) == CONTENT[100:228]
    assert storage.calls.retries == 0


def test_a_read_that_breaks_off_goes_on_where_it_was(web: Web) -> None:
    web.fail("half", "500", "half", "slow")
    storage = _storage(web)
    assert storage.read("a/b.bin", 1000, 201_000) == CONTENT[1000:201_000]
    assert web.ranges == [
        "bytes=1000-200999",
        "bytes=101000-200999",
        "bytes=101000-200999",
        "bytes=151000-200999",
    ]
    assert storage.calls.retries == 3
    assert storage.calls.bytes_read == 200_000


def test_a_file_that_changes_on_the_way_is_read_anew(web: Web) -> None:
    web.fail("half", "changed")
    assert _storage(web).read("a/b.bin") == CONTENT[::-1]


def test_breaking_off_again_and_again_is_no_end_as_long_as_bytes_come(web: Web) -> None:
    web.fail(*["half"] * 12)
    assert _storage(web).read("a/b.bin") == CONTENT


@pytest.mark.parametrize("fault", ["500", "no-length"])
def test_a_server_that_does_not_recover_is_named(web: Web, fault: str) -> None:
    web.fail(*[fault] * 10)
    with pytest.raises(Unreachable, match=r"a/b.bin: reading failed .* 4 times in a row") as raised:
        _storage(web).read("a/b.bin")
    assert raised.value.address == web.address
    assert raised.value.exit_code == 1


def test_a_server_that_hangs_costs_the_time_out_and_not_more(web: Web) -> None:
    web.fail("hang", "whole")
    began = time.monotonic()
    settings = StorageConfig(timeout=0.2, deadline=20, retries=1, backoff=0.001)
    assert _storage(web, settings).read("a/b.bin") == CONTENT
    web.fail("hang", "hang", "hang")
    with pytest.raises(Unreachable, match="timed out"):
        _storage(web, settings).read("a/b.bin")
    assert time.monotonic() - began < 15


def test_what_is_not_there_or_too_short_is_told_at_once(web: Web) -> None:
    storage = _storage(web)
    for act in (storage.stat, storage.read):
        with pytest.raises(Missing, match="nobody: there is no such file"):
            act("nobody")
    for start, end in ((0, 300_001), (400_000, None), (299_000, 400_000)):
        with pytest.raises(Truncated, match="ends at byte 300000"):
            storage.read("a/b.bin", start, end)
    assert storage.calls.retries == 0
    with pytest.raises(RequestError, match="has no listing"):
        list(storage.list(""))
    with pytest.raises(RequestError, match="only read over http"):
        storage.create("x", b"y")


def test_nobody_there(web: Web) -> None:
    storage, _ = open_storage("http://127.0.0.1:9/x", StorageConfig(retries=1, backoff=0.001))
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9/x: reading failed .* refused"):
        storage.read("x")
