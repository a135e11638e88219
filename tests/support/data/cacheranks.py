"""Ranks that read blocks of a web server through one cache folder, as processes that can be killed at any moment."""

import hashlib
import multiprocessing
import os
import random
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from shoal.data.storage.config import StorageConfig
from shoal.data.storage.opening import open_storage
from shoal.data.tiers.cache import BlockCache
from shoal.data.tiers.config import CacheConfig
from shoal.data.tiers.key import BlockKey

SETTINGS = StorageConfig(timeout=10, deadline=60, retries=20, backoff=0.001)


def content_of(number: int, size: int) -> bytes:
    """The bytes of a block of a test."""
    return random.Random(number).randbytes(size)


def keys_of(address: str, num_blocks: int) -> list[BlockKey]:
    """The keys of a test's blocks."""
    return [BlockKey(address=address, path=f"b{number}", version="1") for number in range(num_blocks)]


def start_reader(
    address: str, folder: Path, results: Path, order: Sequence[int], *, disk: str = "64 MiB", policy: str = "lru"
) -> BaseProcess:
    """A process that reads these blocks in order and writes their hashes to ``results``, then what the cache counted."""
    process = multiprocessing.get_context("fork").Process(
        target=_read, args=(address, folder, results, list(order), disk, policy), daemon=True
    )
    process.start()
    return process


def _read(address: str, folder: Path, results: Path, order: list[int], disk: str, policy: str) -> None:
    storage, _ = open_storage(f"{address}/", SETTINGS)
    config = CacheConfig.model_validate({"disk": disk, "path": str(folder), "policy": policy, "block": "16 KiB"})
    cache = BlockCache(config)
    keys = keys_of(address, max(order) + 1)
    with results.open("w") as file:
        for number in order:
            content = cache.get(keys[number], lambda number=number: storage.read(f"b{number}"))
            file.write(f"{number} {hashlib.sha256(content).hexdigest()}\n")
            file.flush()
        counts = cache.counts
        file.write(f"counts {counts.fetches} {counts.disk_hits} {counts.refused} {counts.not_kept}\n")
    os._exit(0)


def wrong_blocks(results: Path, size: int) -> list[str]:
    """Lines of a reader's results whose hash is not that of the block."""
    wrong = []
    for line in results.read_text().splitlines():
        number, _, found = line.partition(" ")
        if number != "counts" and found != hashlib.sha256(content_of(int(number), size)).hexdigest():
            wrong.append(line)
    return wrong
