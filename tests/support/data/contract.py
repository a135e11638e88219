"""What every storage that can be written to has to do, tried on one that is really there."""

import random
import threading

import pytest

from shoal.data.storage.protocol import AlreadyThere, Missing, Storage, Truncated

CONTENT = random.Random(3).randbytes(2_500_000)


def check_storage(storage: Storage, folder: str) -> None:
    """Reads, ranges, listings, exclusive creates and replacements below a folder that is not there yet."""
    path = f"{folder}/day=1/a.bin"
    storage.create(path, CONTENT)
    assert storage.read(path) == CONTENT
    for start, end in ((0, 1), (1_048_570, 1_048_590), (2_499_990, None), (7, 7), (2_500_000, None), (100, 2_400_000)):
        assert storage.read(path, start, end) == CONTENT[start:end], (start, end)
    for start, end in ((0, 2_500_001), (3_000_000, None), (2_400_000, 3_000_000)):
        with pytest.raises(Truncated, match="ends at byte 2500000"):
            storage.read(path, start, end)
    for act in (storage.stat, storage.read):
        with pytest.raises(Missing, match="nobody: there is no such file"):
            act(f"{folder}/nobody")
    _check_race(storage, f"{folder}/race")
    before = storage.stat(path)
    storage.replace(path, b"short")
    assert storage.read(path) == b"short"
    assert storage.stat(path).size == 5
    assert storage.stat(path).version != before.version
    storage.create(f"{folder}/day=1-b/c", b"x")
    storage.create(f"{folder}/day=2/ü x.bin", b"y")
    names = [f"{folder}/{name}" for name in ("day=1-b/c", "day=1/a.bin", "day=2/ü x.bin", "race")]
    assert [entry.path for entry in storage.list(folder)] == sorted(names)
    assert [(entry.path, entry.size) for entry in storage.list(f"{folder}/day=1")] == [(path, 5)]
    assert list(storage.list(f"{folder}/nobody")) == []
    assert storage.read(f"{folder}/day=2/ü x.bin") == b"y"
    for name in names:
        storage.delete(name)
        storage.delete(name)
    assert list(storage.list(folder)) == []


def _check_race(storage: Storage, path: str) -> None:
    won, lost = [], []
    barrier = threading.Barrier(4)

    def race(number: int) -> None:
        barrier.wait()
        try:
            storage.create(path, bytes([number]) * 10_000)
            won.append(number)
        except AlreadyThere:
            lost.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3)
    assert storage.read(path) == bytes(won) * 10_000
