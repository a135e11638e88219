"""What ``[data.cache]`` of a recipe says, and whether this machine has it. No torch."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, field_validator

from shoal.core.config import Config
from shoal.core.errors import RequestError
from shoal.core.units import format_bytes, parse_bytes
from shoal.data.cache.admission import AdmissionConfig
from shoal.data.cache.catalogue import PolicyName


class CacheConfig(Config):
    """How much of remote data is kept near, and which blocks stay."""

    memory: str = "0"
    """Memory of each rank for blocks, such as 512 MiB; 0 keeps none there."""
    disk: str = "0"
    """Room on the local disk for blocks, shared by all ranks of the host; 0 keeps none there."""
    path: str | None = None
    """Folder of the disk tier, on a disk of this machine; needed where ``disk`` is not 0."""
    policy: PolicyName = "planned"
    """Which blocks stay. planned knows the order in which the loader reads and keeps what comes soonest; outside that order it is
    lru."""
    admission: AdmissionConfig = AdmissionConfig()
    """Which blocks are let in."""
    block: str = "1 MiB"
    """About how large a block is; policies that count uses size their memory by it."""
    wait: Annotated[float, Field(gt=0)] = 300.0
    """Seconds to wait for another rank of the host that fetches the same block; after that it is fetched here too."""

    @field_validator("memory", "disk", "block")
    @classmethod
    def _is_bytes(cls, text: str) -> str:
        try:
            parse_bytes(text)
        except RequestError as error:
            raise ValueError(str(error)) from error
        return text

    @property
    def memory_bytes(self) -> int:
        """Of each rank."""
        return parse_bytes(self.memory)

    @property
    def disk_bytes(self) -> int:
        """Of the host."""
        return parse_bytes(self.disk)

    @property
    def block_bytes(self) -> int:
        """About how large a block is."""
        return max(1, parse_bytes(self.block))


def check_cache(config: CacheConfig, *, num_ranks: int = 1) -> None:
    """Refuse what this machine does not have, before a process starts. ``num_ranks`` is of this host.

    Raises:
        RequestError: names what is asked for and what is there.
    """
    memory = psutil.virtual_memory().total
    wanted = config.memory_bytes * num_ranks
    if wanted > memory:
        raise RequestError(
            f"data.cache.memory = {config.memory} for each of {num_ranks} ranks is {format_bytes(wanted)}, and this machine "
            f"has {format_bytes(memory)}; make it at most {format_bytes(memory // 2 // num_ranks)}"
        )
    if not config.disk_bytes:
        return
    if config.path is None:
        raise RequestError(f"data.cache.disk = {config.disk} needs data.cache.path, a folder on a disk of this machine")
    folder = Path(config.path).expanduser().absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RequestError(f"data.cache.path {folder}: {there} is no folder that can be written to")
    # What the cache holds already is room that it has.
    held = sum(_size(each) for each in folder.glob("blocks/*/*")) if folder.is_dir() else 0
    free = shutil.disk_usage(there).free + held
    if config.disk_bytes > free:
        raise RequestError(
            f"data.cache.disk = {config.disk} ({format_bytes(config.disk_bytes)}) is more than the {format_bytes(free)} that are "
            f"free at {folder}; make it smaller or put data.cache.path on a larger disk"
        )


def _size(file: Path) -> int:
    """Of a block, 0 where another process that shares the folder has let it go since it was listed."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
