"""The files of a store under a run that reads them: whether one was deleted or written to since the run began.

A mapped file shows what is written into it later, and a digest that was compared once does not notice. So the sizes and times of
all blocks are looked at before every checkpoint, and a block that has another time is read through again.
"""

import os
from pathlib import Path

from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import BLOCKS, block_name, check_bytes
from shoal.data.store.reader import StoreReader


class WatchedStore:
    """The blocks of one version on this machine, as they were when this was made.

    Raises:
        BrokenFile: one is missing or has another length than the manifest says.
    """

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._number = {block_name(reader.block_list.digest(number)): number for number in range(reader.num_blocks)}
        self._seen = self._look()
        for name, number in self._number.items():
            ref = reader.blocks.ref(number)
            if name not in self._seen:
                raise BrokenFile(reader.blocks.name(number), f"it is gone; version {reader.version} names it")
            if self._seen[name][0] != ref.num_bytes:
                raise BrokenFile(
                    reader.blocks.name(number),
                    f"it has {self._seen[name][0]} bytes, and the manifest says {ref.num_bytes}",
                )

    def find_damage(self) -> str | None:
        """What was done to a block since the last look, with its name; None where everything is as it was."""
        now = self._look()
        for name, before in self._seen.items():
            found = now.get(name)
            if found == before:
                continue
            number = self._number[name]
            address = self._reader.blocks.name(number)
            if found is None:
                return f"{address} was deleted while this run reads it"
            try:
                problem = check_bytes(memoryview(self._path(name).read_bytes()), self._reader.blocks.ref(number))
            except OSError as error:
                problem = f"it cannot be read: {error.strerror}"
            if problem:
                return f"{address} was written to while this run reads it: {problem}"
            self._seen[name] = found
        return None

    def _path(self, name: str) -> Path:
        found = self._reader.folder.local_path(BLOCKS, name)
        assert found is not None, "only files of this machine are watched"
        return found

    def _look(self) -> dict[str, tuple[int, int, int]]:
        seen = {}
        with os.scandir(self._path("")) as entries:
            for entry in entries:
                if entry.name in self._number:
                    found = entry.stat()
                    seen[entry.name] = found.st_size, found.st_mtime_ns, found.st_ino
        return seen
