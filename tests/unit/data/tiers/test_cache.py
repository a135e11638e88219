"""Memory over disk over a storage: what is fetched, what is kept, what is refused."""

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.data.storage.memory import MemoryStorage
from shoal.data.storage.protocol import Entry, Truncated, Unreachable, WrongBytes
from shoal.data.tiers.cache import BlockCache
from shoal.data.tiers.config import CacheConfig, check_cache
from shoal.data.tiers.key import BlockKey, digest_of
from shoal.data.tiers.reading import CachedStorage


class Source:
    """Blocks by number, and how often each was fetched."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.fetched: Counter[int] = Counter()
        self.wrong = 0

    def content(self, number: int) -> bytes:
        return bytes([number % 251]) * self.size

    def get(self, cache: BlockCache, number: int, *, digest: bool = False) -> bytes:
        key = BlockKey(
            address="test://x", path=f"b{number}", digest=digest_of(self.content(number)) if digest else None
        )

        def fetch() -> bytes:
            self.fetched[number] += 1
            if self.wrong:
                self.wrong -= 1
                return self.content(number + 1)
            return self.content(number)

        return cache.get(key, fetch)


def _config(tmp_path: Path, **changes: str) -> CacheConfig:
    values = {"memory": "2 KiB", "disk": "8 KiB", "path": str(tmp_path / "cache"), "policy": "lru", "block": "1 KiB"}
    return CacheConfig.model_validate(values | changes)


def _files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "blocks").glob("*/*"))


def test_each_tier_answers_for_the_one_below(tmp_path: Path) -> None:
    source, cache = Source(), BlockCache(_config(tmp_path))
    for number in (1, 2, 3, 1, 3, 3):
        assert source.get(cache, number) == source.content(number)
    assert source.fetched == {1: 1, 2: 1, 3: 1}
    report = cache.report()
    assert (report.memory_hits, report.disk_hits, report.fetches) == (2, 1, 3)
    assert (report.memory_bytes, report.disk_bytes, report.fetched_bytes) == (2000, 1000, 3000)
    assert cache.report().fetches == 0, "a report is of what was done since the last one"
    # Another rank finds on the disk what this one has fetched.
    other = BlockCache(_config(tmp_path))
    assert source.get(other, 2) == source.content(2)
    assert source.fetched[2] == 1


def test_the_disk_keeps_to_its_limit_and_to_its_policy(tmp_path: Path) -> None:
    source = Source()
    caches = [BlockCache(_config(tmp_path, memory="0", disk="4096")) for _ in range(2)]
    for number in range(10):
        source.get(caches[number % 2], number)
        assert sum(file.stat().st_size for file in _files(tmp_path)) <= 4096
    assert len(_files(tmp_path)) == 3
    for number in (7, 8, 9):
        assert source.get(caches[0], number) == source.content(number)
    assert sum(source.fetched.values()) == 10, "the last three were there"
    # Both processes agree on who was used last, whichever of them used it.
    source.get(caches[1], 7)
    source.get(caches[0], 10)
    source.get(caches[1], 7)
    assert source.fetched[7] == 1
    source.get(caches[1], 8)
    assert source.fetched[8] == 2, "8 was the oldest when 10 came"


def test_a_block_that_leaves_the_memory_moves_down(tmp_path: Path) -> None:
    source, cache = Source(), BlockCache(_config(tmp_path, memory="3 KiB", disk="3000"))
    for number in (1, 2, 3):
        source.get(cache, number)
    assert len(_files(tmp_path)) == 2
    source.get(cache, 1)
    # 2 leaves the memory, and was turned out on the disk by 4.
    source.get(cache, 4)
    source.get(cache, 2)
    assert source.fetched[2] == 1


@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "empty"])
def test_a_block_that_was_altered_on_the_disk_is_refused_and_fetched_again(tmp_path: Path, harm: str) -> None:
    source = Source()
    for number in (1, 2):
        source.get(BlockCache(_config(tmp_path, memory="0")), number)
    first, second = _files(tmp_path)
    data = bytearray(first.read_bytes())
    if harm == "flip":
        data[500] ^= 1
    elif harm == "cut":
        del data[700:]
    elif harm == "empty":
        data.clear()
    else:
        data = bytearray(second.read_bytes())
    first.write_bytes(data)
    cache = BlockCache(_config(tmp_path, memory="0"))
    for number in (1, 2, 1, 2):
        assert source.get(cache, number) == source.content(number)
    assert cache.counts.refused == 1
    assert sum(source.fetched.values()) == 3


def test_wrong_bytes_on_their_way_are_fetched_again_and_never_handed_on(tmp_path: Path) -> None:
    source, cache = Source(), BlockCache(_config(tmp_path))
    source.wrong = 2
    assert source.get(cache, 1, digest=True) == source.content(1)
    assert (cache.counts.refused, source.fetched[1]) == (2, 3)
    source.wrong = 9
    with pytest.raises(
        WrongBytes, match=r"test://x/b2: 1000 bytes with digest \w{32} came 3 times, and \w{32} was written"
    ):
        source.get(cache, 2, digest=True)
    source.wrong = 0
    assert source.get(cache, 2, digest=True) == source.content(2)


def test_what_a_fetch_raises_is_raised_and_leaves_no_lock(tmp_path: Path) -> None:
    cache = BlockCache(_config(tmp_path))
    key = BlockKey(address="test://x", path="y")

    def away() -> bytes:
        raise Unreachable("away", address="test://x", path="y")

    def refused() -> bytes:
        raise OSError(errno.EIO, "input/output error")

    with pytest.raises(Unreachable, match="away"):
        cache.get(key, away)
    with pytest.raises(OSError, match="input/output"):
        cache.get(key, refused)
    assert cache.get(key, lambda: b"now") == b"now"


def test_a_disk_that_refuses_costs_speed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = Source(), BlockCache(_config(tmp_path, memory="0"))
    source.get(cache, 1)
    (tmp_path / "cache").rename(tmp_path / "gone")
    (tmp_path / "cache").write_bytes(b"a file where the folder was")
    for number in (1, 2, 1):
        assert source.get(cache, number) == source.content(number)
    assert source.fetched == {1: 3, 2: 1}
    assert cache.report().not_kept == 3


def test_a_journal_that_is_torn_or_has_grown(tmp_path: Path) -> None:
    from shoal.data.cache.recency import Lru
    from shoal.data.tiers.disk import DiskTier

    folder = tmp_path / "cache"
    tiers = [DiskTier(folder, lambda: Lru(5000), most_records=20) for _ in range(2)]
    for round in range(30):
        for number in range(6):
            key = bytes([number]) * 16
            tier = tiers[(round + number) % 2]
            content = tier.read(key)
            assert content is None or content == bytes([number]) * 1000
            if content is None:
                assert tier.put(key, bytes([number]) * 1000)
        if round % 7 == 0:
            journal = next(folder.glob("journal-*"))
            with journal.open("ab") as file:
                file.write(b"torn" * (round + 1))
        assert sum(file.stat().st_size for file in folder.glob("blocks/*/*")) <= 5000
    journals = list(folder.glob("journal-*"))
    assert len(journals) == 1
    assert journals[0].stat().st_size <= 22 * 32 + 200
    assert int(journals[0].name.partition("-")[2]) > 3


def test_what_nobody_knows_of_is_swept(tmp_path: Path) -> None:
    source = Source()
    source.get(BlockCache(_config(tmp_path, memory="0")), 1)
    stranger = tmp_path / "cache" / "blocks" / "ab" / ("ab" * 16)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"x")
    draft = tmp_path / "cache" / "blocks" / ".0123"
    draft.write_bytes(b"half")
    BlockCache(_config(tmp_path, memory="0"))
    assert not stranger.exists()
    assert not draft.exists()
    assert len(_files(tmp_path)) == 1


def test_a_plan_decides_on_the_disk_too(tmp_path: Path) -> None:
    source = Source()
    cache = BlockCache(_config(tmp_path, memory="0", disk="2100", policy="planned"))
    order = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]
    cache.plan_host([BlockKey(address="test://x", path=f"b{number}") for number in order])
    for number in order:
        source.get(cache, number)
    assert sum(source.fetched.values()) == 4 + 2 + 2, "two of four stay, and the plan says which"


def test_reads_of_a_storage_through_the_cache(tmp_path: Path) -> None:
    storage = MemoryStorage("reading")
    storage.create("f", b"0123456789")
    cached = CachedStorage(storage, BlockCache(_config(tmp_path)))
    assert cached.read("f", 2, 5) == cached.read("f", 2, 5) == b"234"
    assert [entry.size for entry in cached.list("")] == [10]
    storage.replace("f", b"abcdefghij")
    assert cached.read("f", 2, 5) == b"234", "a run reads the version that was there when it began"
    again = CachedStorage(storage, BlockCache(_config(tmp_path)))
    assert again.read("f", 2, 5) == b"cde"


class Asked(MemoryStorage):
    """A storage that keeps which ranges it was asked for, and may say no version."""

    def __init__(self, *, has_version: bool = True) -> None:
        super().__init__("asked")
        self.has_version = has_version
        self.ranges: list[tuple[int, int | None]] = []

    def stat(self, path: str) -> Entry:
        entry = super().stat(path)
        return entry if self.has_version else replace(entry, version="")

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        self.ranges.append((start, end))
        return super().read(path, start, end)


def test_ranges_in_any_steps_are_of_the_same_blocks(tmp_path: Path) -> None:
    storage, content = Asked(), bytes(range(250)) * 10
    storage.create("f", content)
    cached = CachedStorage(storage, BlockCache(_config(tmp_path)))
    for start, end in ((0, 10), (1000, 1100), (5, 2500), (2048, None), (0, 1024), (1023, 1025)):
        assert cached.read("f", start, end) == content[start:end]
    assert storage.ranges == [(0, 1024), (1024, 2048), (2048, 2500)]
    assert cached.read("f", 7, 7) == b""
    with pytest.raises(Truncated, match="2501"):
        cached.read("f", 2400, 2501)


def test_what_says_no_version_is_not_kept(tmp_path: Path) -> None:
    storage = Asked(has_version=False)
    storage.create("f", b"0123456789")
    assert CachedStorage(storage, BlockCache(_config(tmp_path))).read("f", 2, 5) == b"234"
    storage.replace("f", b"abcdefghij")
    assert CachedStorage(storage, BlockCache(_config(tmp_path))).read("f", 2, 5) == b"cde"


def test_what_the_machine_does_not_have_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"disk = 900 TiB \(900.0 TiB\) is more than the [\d.]+ [GT]iB that are free"
    ):
        check_cache(_config(tmp_path, disk="900 TiB"))
    with pytest.raises(RequestError, match=r"for each of 4 ranks is 80.0 TiB, and this machine has"):
        check_cache(_config(tmp_path, memory="20 TiB"), num_ranks=4)
    with pytest.raises(RequestError, match=r"needs data.cache.path"):
        check_cache(CacheConfig(disk="1 MiB"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RequestError, match="is no folder that can be written to"):
        check_cache(_config(tmp_path, path=str(tmp_path / "file" / "x")))
    with pytest.raises(ValueError, match="is not a number of bytes"):
        _config(tmp_path, disk="much")
    check_cache(_config(tmp_path))


def test_of_ranks_that_plan_the_first_is_heard_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    source = Source()
    config = _config(tmp_path, memory="0", disk="2100", policy="planned")
    first, second = BlockCache(config), BlockCache(config)
    keys = {number: BlockKey(address="test://x", path=f"b{number}") for number in range(9)}
    first.plan_host([keys[1], keys[2], keys[3], keys[3]])
    second.plan_host([keys[4]] * 50)
    assert (tmp_path / "cache" / "journal-00000000").stat().st_size == 5 * 32, (
        "one that begins a plan, four that are it"
    )
    for number in (1, 2, 3):
        source.get(second, number)
    source.get(first, 3)
    assert source.fetched == {1: 1, 2: 1, 3: 1}, "3 came in because it comes again"


def test_a_block_that_another_process_lets_go_meanwhile_stops_no_check(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "blocks" / "ab"
    folder.mkdir(parents=True)
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    check_cache(_config(tmp_path))


def test_a_folder_whose_lock_cannot_be_had_costs_speed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "cache" / "lock").mkdir(parents=True)
    source, cache = Source(), BlockCache(_config(tmp_path))
    for number in (1, 2, 3, 4, 1):
        assert source.get(cache, number, digest=True) == source.content(number)
    assert cache.counts.not_kept == cache.counts.fetches == 5
