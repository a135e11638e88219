"""Local files: exact reads, exclusive creates, whole replacements, sorted listings."""

import threading
from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.data.storage.local import LocalStorage
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import AlreadyThere, Missing, Storage, Truncated, Unreachable


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path)
    return open_storage(f"memory://{tmp_path.name}")[0]


def test_reads_are_exact_or_refused(storage: Storage) -> None:
    storage.create("a/b.bin", b"0123456789")
    assert storage.read("a/b.bin") == b"0123456789"
    assert storage.read("a/b.bin", 3, 6) == b"345"
    assert storage.read("a/b.bin", 8) == b"89"
    assert storage.read("a/b.bin", 10) == b""
    for start, end in ((5, 11), (11, None)):
        with pytest.raises(Truncated, match="ends at byte 10"):
            storage.read("a/b.bin", start, end)


def test_what_is_not_there_is_named(storage: Storage) -> None:
    storage.create("a/b", b"x")
    for act in (storage.stat, storage.read):
        for path in ("nobody", "a", "a/b/c"):
            with pytest.raises(Missing, match=f"{path}: there is no such file") as raised:
                act(path)
            assert raised.value.exit_code == 2
    storage.delete("nobody")
    assert list(storage.list("nobody")) == []


def test_of_many_writers_one_creates(storage: Storage) -> None:
    won, lost = [], []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        try:
            storage.create("v/1.json", bytes([number]) * 5000)
            won.append(number)
        except AlreadyThere:
            lost.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    assert storage.read("v/1.json") == bytes(won) * 5000
    assert [entry.path for entry in storage.list("")] == ["v/1.json"]


def test_a_replaced_file_has_another_version(storage: Storage) -> None:
    storage.replace("x", b"old")
    before = storage.stat("x")
    storage.replace("x", b"new")
    assert storage.read("x") == b"new"
    assert storage.stat("x").version != before.version
    storage.delete("x")
    with pytest.raises(Missing):
        storage.stat("x")


def test_a_listing_is_sorted_by_path(storage: Storage) -> None:
    for path in ("b/2", "b-/1", "b/10", "a", "b/c/d"):
        storage.create(path, path.encode())
    assert [entry.path for entry in storage.list("")] == sorted(["b/2", "b-/1", "b/10", "a", "b/c/d"])
    assert [(entry.path, entry.size) for entry in storage.list("b")] == [("b/10", 4), ("b/2", 3), ("b/c/d", 5)]


def test_no_path_leaves_the_storage(storage: Storage) -> None:
    for path in ("../x", "/etc/passwd", "a/../../b", "", "a\0b"):
        with pytest.raises(RequestError, match="is no path inside"):
            storage.read(path)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(Unreachable, match="file/below"):
        storage.create("file/below", b"y")
    assert [entry.path for entry in storage.list("")] == ["file"]


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"here")
    monkeypatch.chdir(tmp_path / "data")
    for address in ("x", f"{tmp_path}/data/x", f"file://{tmp_path}/data/x", "../data/x", "./x"):
        storage, path = open_storage(address)
        assert storage.read(path) == b"here"
    for wrong, said in (("", "empty address"), ("file://x", "root"), ("nosuch://x/y", "nosuch")):
        with pytest.raises(RequestError, match=said):
            open_storage(wrong)
