"""What reading a store costs in processor time, in order and at random, beside a bare memory map of the same bytes."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.order import permute
from shoal.data.store.reader import StoreReader


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Processor time of one order."""

    order: str
    store_us: float
    """Microseconds a row, of the store."""
    memmap_us: float
    """Microseconds a row, of a bare memory map."""


def measure_reading(reader: StoreReader, *, batch: int, most_rows: int, rounds: int) -> list[Reading]:
    """Read rows by batches out of a store and out of a memory map of as many bytes a row, in turns.

    Args:
        reader: of the store.
        batch: rows of one read.
        most_rows: that are read in each turn.
        rounds: turns; the medians count.

    Raises:
        RequestError: a row has no fixed length.
    """
    if any(field.is_ragged for field in reader.schema.fields):
        names = ", ".join(field.name for field in reader.schema.fields if field.is_ragged)
        raise RequestError(
            f"rows of many lengths ({names}) have no memory map to compare with; measure a store of numbers"
        )
    num_rows = min(most_rows, len(reader))
    width = sum(int(np.prod(field.shape, dtype=np.int64)) * field.dtype.itemsize for field in reader.schema.fields)
    ordered = np.arange(num_rows, dtype=np.int64)
    orders = {"in order": ordered, "at random": permute(0, 0, len(reader), ordered)}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        np.memmap(path, dtype=np.uint8, mode="w+", shape=(len(reader), width))[:] = 1
        bare: NDArray[Any] = np.memmap(path, dtype=np.uint8, mode="r", shape=(len(reader), width))
        for name, rows in orders.items():
            batches = [rows[start : start + batch] for start in range(0, num_rows, batch)]
            times: dict[str, list[float]] = {"store": [], "memmap": []}
            for _ in range(rounds):
                times["store"].append(_seconds(reader.read, batches))
                times["memmap"].append(_seconds(bare.__getitem__, batches))
            middle = {side: statistics.median(values) / num_rows * 1e6 for side, values in times.items()}
            found.append(Reading(order=name, store_us=middle["store"], memmap_us=middle["memmap"]))
    return found


def _seconds(read: Callable[[NDArray[np.int64]], Any], batches: list[NDArray[np.int64]]) -> float:
    start = time.process_time()
    for rows in batches:
        read(rows)
    return time.process_time() - start
