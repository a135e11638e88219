"""The blocks of a version as tables in memory: mapped where they lie on this machine, fetched and unpacked where they do not.

The digest of a block is compared once in each process, when it is first opened; what is mapped afterwards is watched by its size
and time (``checks/watch.py``).
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from shoal.data.store.block import read_block, read_header
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import BLOCKS, StoreFolder, block_name, check_bytes
from shoal.data.store.manifest import BlockList, FileRef
from shoal.data.table import Schema, Table

MAX_MAPPED = 8192
"""Blocks that one process has mapped at a time; Linux allows a process 65,530 maps."""
FETCHED_BYTES = 256 * 2**20
"""Of blocks that are kept unpacked in memory."""

_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""A block is read through for its digest as soon as it is mapped: to take its pages one by one would cost more than to map it."""

Fetch = Callable[[str, int, str], memoryview]
"""Path in the storage, length and digest of a block -> its bytes, from whatever cache there is."""


class Blocks:
    """The blocks of a version by their numbers.

    Args:
        folder: of the store.
        schema: of the version.
        blocks: of the version.
        is_sequential: blocks are read one behind another, so the system may read ahead.
        fetch: where blocks that are not on this machine come from; the storage itself when left out.
        fetched_bytes: how much is kept of blocks that are not mapped.
    """

    def __init__(
        self,
        folder: StoreFolder,
        schema: Schema,
        blocks: BlockList,
        *,
        is_sequential: bool = False,
        fetch: Fetch | None = None,
        fetched_bytes: int = FETCHED_BYTES,
    ) -> None:
        self._folder, self._schema, self._blocks = folder, schema, blocks
        self._advice = mmap.MADV_SEQUENTIAL if is_sequential else mmap.MADV_RANDOM
        self._fetch = fetch
        self._room = fetched_bytes
        self._open: OrderedDict[int, tuple[Table, int]] = OrderedDict()
        self._is_proven = np.zeros(len(blocks), dtype=np.bool_)
        self._root = folder.local_path(BLOCKS) if fetch is None else None
        self._held = 0
        self.keeps_all = self._root is not None and len(blocks) <= MAX_MAPPED
        """True where a block that was opened stays open: all of them are mapped."""
        self._lock = threading.Lock()
        """Of what is kept: several threads may read, and a block is loaded without it."""
        self.num_opened = 0
        """How often a block was opened, for tests and measurements."""

    def table(self, number: int) -> Table:
        """The rows of one block.

        Raises:
            BrokenFile: it is gone, torn or altered; names its file.
        """
        found = self._open.get(number)
        if found is not None:
            if self._held > self._room // 2 or len(self._open) > MAX_MAPPED // 2:
                # Only then does it matter who goes next.
                with self._lock:
                    if number in self._open:
                        self._open.move_to_end(number)
            return found[0]
        table, size = self._load(number)
        with self._lock:
            if (other := self._open.get(number)) is not None:
                return other[0]  # Another thread was quicker.
            self._open[number] = table, size
            self._held += size
            while len(self._open) > 1 and (self._held > self._room or len(self._open) > MAX_MAPPED):
                _, (_, gone) = self._open.popitem(last=False)
                self._held -= gone
        return table

    def ref(self, number: int) -> FileRef:
        """The file of one block."""
        return FileRef(
            digest=self._blocks.digest(number),
            num_bytes=int(self._blocks.num_bytes[number]),
            num_rows=int(self._blocks.num_rows[number]),
        )

    def name(self, number: int) -> str:
        """The address of one block's file."""
        return f"{self._folder.address}/{BLOCKS}/{block_name(self._blocks.digest(number))}"

    def _load(self, number: int) -> tuple[Table, int]:
        self.num_opened += 1
        ref, name = self.ref(number), self.name(number)
        data = self._map(ref, name) if self._root is not None else None
        is_mapped = data is not None
        if data is None:
            data = self._fetched(ref)
        elif not self._is_proven[number]:
            if problem := check_bytes(data, ref):
                raise BrokenFile(name, problem)
            self._is_proven[number] = True
        table = read_block(data, self._schema, file=name)
        if len(table) != ref.num_rows:
            raise BrokenFile(name, f"it has {len(table)} rows, and the manifest says {ref.num_rows}")
        # What lies in a map is the system's to drop; an unpacked block is ours.
        if is_mapped and read_header(data, self._schema, file=name).codec == "none":
            return table, 0
        self.keeps_all = False
        return table, max(sum(column.values.nbytes for column in table.columns), len(data))

    def _map(self, ref: FileRef, name: str) -> memoryview | None:
        try:
            descriptor = os.open(f"{self._root}/{block_name(ref.digest)}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(descriptor, 0, flags=_MAP_FLAGS, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise BrokenFile(name, "it is gone; the manifest names it") from None
        except (ValueError, OSError) as error:
            raise BrokenFile(name, f"it cannot be read: {error}") from error
        if len(mapped) != ref.num_bytes:
            raise BrokenFile(
                name, f"it has {len(mapped)} bytes, and the manifest says {ref.num_bytes}; it is torn or replaced"
            )
        mapped.madvise(self._advice)
        return memoryview(mapped)

    def _fetched(self, ref: FileRef) -> memoryview:
        if self._fetch is None:
            return self._folder.read(BLOCKS, ref)
        name = block_name(ref.digest)
        data = self._fetch(self._folder.path(BLOCKS, name), ref.num_bytes, ref.digest)
        if problem := check_bytes(data, ref):
            raise BrokenFile(f"{self._folder.address}/{BLOCKS}/{name}", problem)
        return data
