"""The cache that readers ask for blocks: this rank's memory, then the host's disk, then the storage.

Everything in it is a copy of what a storage has, so nothing that is evicted is lost. A block that leaves the memory goes to the
disk where it is not there yet, unless the disk has a plan, which has decided already. What comes from the storage is held to its
digest, where that is known, and what comes from the disk always; a block that does not agree is counted and fetched again. Of the
ranks of a host one fetches a block and the others wait for it; one that is killed while it fetches lets go of its lock by that.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from shoal.core.events import DataCache
from shoal.data.cache.admission import Admitted
from shoal.data.cache.catalogue import build_policy
from shoal.data.cache.policy import Plannable, Policy
from shoal.data.storage.protocol import WrongBytes
from shoal.data.tiers.config import CacheConfig
from shoal.data.tiers.disk import DiskTier, Torn
from shoal.data.tiers.key import BlockKey, digest_of

_FETCHES = 3
"""How often a block is fetched whose bytes do not have the digest they should have."""
_STRIPES = 64


@dataclass
class Counts:
    """What the cache has done; the fields of the event."""

    memory_hits: int = 0
    disk_hits: int = 0
    fetches: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    wait_seconds: float = 0.0
    refused: int = 0
    not_kept: int = 0


class BlockCache:
    """One rank's cache. Threads may share it."""

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._policy = _build(config, config.memory_bytes) if config.memory_bytes else None
        self._blocks: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._fetching = [threading.Lock() for _ in range(_STRIPES)]
        self._disk: DiskTier | None = None
        if config.disk_bytes:
            assert config.path is not None, "check_cache refuses a disk tier without a folder"
            folder = Path(config.path).expanduser().absolute()
            self._disk = DiskTier(folder, lambda: _build(config, config.disk_bytes))
        self.counts = Counts()
        self._reported = Counts()

    @property
    def block_bytes(self) -> int:
        """About how large a block is."""
        return self._config.block_bytes

    def get(self, key: BlockKey, fetch: Callable[[], bytes]) -> bytes:
        """The block; ``fetch`` brings it from the storage where no tier has it.

        Raises:
            WrongBytes: the storage has other bytes than the key's digest, every time.
            StorageError: what ``fetch`` raises.
        """
        found = self._from_memory(key.hash)
        if found is not None:
            return found
        with self._fetching[key.hash[0] % _STRIPES]:
            # Another thread may have brought it meanwhile.
            found = self._from_memory(key.hash)
            if found is not None:
                return found
            content = self._fetch(key, fetch) if self._disk is None else self._from_disk(self._disk, key, fetch)
        self._keep(key.hash, content)
        return content

    def plan(self, keys: Sequence[BlockKey]) -> None:
        """This rank asks for these blocks next, in this order, after those it has planned already."""
        if isinstance(self._policy, Plannable):
            with self._lock:
                self._policy.plan([key.hash for key in keys])

    def plan_host(self, keys: Sequence[BlockKey]) -> None:
        """All ranks of this host ask for these blocks next. Each of them says it, and the first is heard, for the disk tier."""
        if self._disk is not None:
            self._disk.plan([key.hash for key in keys])

    def report(self) -> DataCache:
        """What was done since the last report."""
        with self._lock:
            now = Counts(**{each.name: getattr(self.counts, each.name) for each in fields(Counts)})
        since = {each.name: getattr(now, each.name) - getattr(self._reported, each.name) for each in fields(Counts)}
        self._reported = now
        return DataCache(**since)

    def _from_memory(self, key: bytes) -> bytes | None:
        with self._lock:
            if self._policy is None or key not in self._blocks:
                return None
            content = self._blocks[key]
            self._policy.access(key, len(content))
            self.counts.memory_hits += 1
            self.counts.memory_bytes += len(content)
            return content

    def _from_disk(self, disk: DiskTier, key: BlockKey, fetch: Callable[[], bytes]) -> bytes:
        content = self._read(disk, key.hash)
        if content is not None:
            return content
        began = time.monotonic()
        with disk.fetching(key.hash, self._config.wait) as is_mine:
            self._count(wait_seconds=time.monotonic() - began)
            # Somebody else may have fetched it while we waited.
            content = self._read(disk, key.hash)
            if content is not None:
                return content
            content = self._fetch(key, fetch)
            if not (is_mine and disk.put(key.hash, content)):
                self._count(not_kept=1)
        return content

    def _read(self, disk: DiskTier, key: bytes) -> bytes | None:
        try:
            content = disk.read(key)
        except Torn:
            self._count(refused=1)
            return None
        if content is not None:
            self._count(disk_hits=1, disk_bytes=len(content))
        return content

    def _fetch(self, key: BlockKey, fetch: Callable[[], bytes]) -> bytes:
        for _ in range(_FETCHES):
            began = time.monotonic()
            content = fetch()
            self._count(fetches=1, fetched_bytes=len(content), fetch_seconds=time.monotonic() - began)
            found = digest_of(content) if key.digest is not None else None
            if found == key.digest:
                return content
            self._count(refused=1)
        raise WrongBytes(
            f"{key}: {len(content)} bytes with digest {found} came {_FETCHES} times, and {key.digest} was written; the file is "
            "damaged or was replaced",
            address=key.address,
            path=key.path,
        )

    def _keep(self, key: bytes, content: bytes) -> None:
        if self._policy is None:
            return
        with self._lock:
            evicted = self._policy.access(key, len(content)).evicted
            if key in self._policy:
                self._blocks[key] = content
            leaving = [(victim, self._blocks.pop(victim)) for victim in evicted if victim in self._blocks]
        if self._config.policy == "planned":
            # The disk has the same plan and has decided; a block that moves down is no access, and would be taken for one.
            return
        for victim, old in leaving:
            if self._disk is not None and not self._disk.has(victim):
                self._disk.put(victim, old)

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + value)


def _build(config: CacheConfig, capacity: int) -> Policy:
    num_keys = max(1, capacity // config.block_bytes)
    policy = build_policy(config.policy, capacity, num_keys=num_keys)
    return Admitted(policy, config.admission, num_keys=num_keys)
