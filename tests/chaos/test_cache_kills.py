"""Ranks that are killed while they fetch, and a disk that fills: one fetch for a host, and no wrong byte."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.cacheranks import content_of, start_reader, wrong_blocks
from support.data.webserver import Web, serving

NUM_BLOCKS, SIZE = 24, 20_000


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    found.files = {f"b{number}": content_of(number, SIZE) for number in range(NUM_BLOCKS)}
    with serving(found):
        yield found


def test_a_block_is_fetched_once_however_many_ranks_ask(web: Web, tmp_path: Path) -> None:
    web.fail("slow", "500", "half", "slow", "whole", "half")
    readers = []
    for rank in range(4):
        order = random.Random(rank).sample(range(NUM_BLOCKS), NUM_BLOCKS) * 2
        readers.append(start_reader(web.address, tmp_path / "cache", tmp_path / f"r{rank}", order))
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0
    results = [tmp_path / f"r{rank}" for rank in range(4)]
    assert [wrong for file in results for wrong in wrong_blocks(file, SIZE)] == []
    fetches = [int(file.read_text().splitlines()[-1].split()[1]) for file in results]
    assert sum(fetches) == NUM_BLOCKS, "each block was fetched by one rank of the host"
    # The server was asked again only where it had answered with an error or by half.
    assert sum(web.asked.values()) == NUM_BLOCKS + 3


def _kill_ranks(web: Web, folder: Path, kills: int, seed: int) -> None:
    """Readers without end, of which one after the other is killed at a random moment."""
    choose = random.Random(seed)
    # Slow answers, so that whoever is killed is most often in the middle of a fetch.
    web.fail(*["slow"] * 100_000)
    readers = {}
    killed: Counter[str] = Counter()

    def start(number: int) -> None:
        order = [choose.randrange(NUM_BLOCKS) for _ in range(4000)]
        # Half of the blocks fit, so there is always something to fetch and to evict.
        disk = str(NUM_BLOCKS // 2 * (SIZE + 100))
        readers[number] = start_reader(web.address, folder / "cache", folder / f"r{number}", order, disk=disk)

    for number in range(3):
        start(number)
    for number in range(3, 3 + kills):
        time.sleep(choose.uniform(0.01, 0.06))
        victim = choose.choice(sorted(readers))
        process = readers.pop(victim)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            killed["ranks"] += 1
        process.join(10)
        start(number)
    for process in readers.values():
        process.kill()
        process.join(10)
    assert killed["ranks"] == kills
    web.faults.clear()
    # Who comes next finds no lock that is held, no wrong block, and no more on the disk than its limit.
    last = folder / "last"
    reader = start_reader(web.address, folder / "cache", last, [*range(NUM_BLOCKS)] * 2)
    reader.join(60)
    assert reader.exitcode == 0
    assert len(last.read_text().splitlines()) == 2 * NUM_BLOCKS + 1
    refused = 0
    for results in [last, *folder.glob("r*")]:
        lines = results.read_text().rpartition("\n")[0].splitlines()
        refused += sum(int(line.split()[3]) for line in lines if line.startswith("counts"))
        results.write_text("\n".join(lines))
        assert wrong_blocks(results, SIZE) == []
    assert refused == 0, "a block on the disk is whole or absent, whoever was killed"
    assert list((folder / "cache" / "blocks").glob(".*")) == []


def test_killed_ranks_leave_nothing_wrong_and_nobody_waiting(web: Web, tmp_path: Path) -> None:
    _kill_ranks(web, tmp_path, kills=8, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_hundred_kills(web: Web, tmp_path: Path) -> None:
    _kill_ranks(web, tmp_path, kills=100, seed=2)


def test_a_rank_that_is_stopped_while_it_fetches_delays_and_does_not_hold_up(web: Web, tmp_path: Path) -> None:
    web.fail("hang")
    first = start_reader(web.address, tmp_path / "cache", tmp_path / "r0", [0])
    deadline = time.monotonic() + 30
    while not web.asked["b0"] and time.monotonic() < deadline:
        time.sleep(0.005)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second = start_reader(web.address, tmp_path / "cache", tmp_path / "r1", [0])
    second.join(20)
    assert second.exitcode == 0, "the lock went with the process that held it"
    assert wrong_blocks(tmp_path / "r1", SIZE) == []
    first.join(10)


def test_a_disk_that_fills_costs_speed_and_nothing_else(web: Web, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system of 200 KiB cannot be mounted here: {mounted.stderr.strip()}")
    try:
        # The limit says 64 MiB, and the disk has room for nine blocks.
        order = [*range(NUM_BLOCKS)] * 2
        reader = start_reader(web.address, folder / "cache", tmp_path / "r0", order)
        reader.join(60)
        assert reader.exitcode == 0
        assert wrong_blocks(tmp_path / "r0", SIZE) == []
        _, fetches, hits, refused, not_kept = (tmp_path / "r0").read_text().splitlines()[-1].split()
        assert int(hits) >= 7, "what has found room is served from there"
        assert int(not_kept) >= 25
        assert int(fetches) + int(hits) == len(order)
        assert int(refused) == 0
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["umount", str(folder)], check=False)
