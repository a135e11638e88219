"""The block store beside a bare memory map and, where it is installed, Lance: processor time per sample, in order and at random.

Every turn opens the store anew, so that each block's digest is compared once in it, as in an epoch. Turns of the contenders
alternate; the medians count.
"""

import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.order import permute
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.reader import open_store
from shoal.data.store.writer import BuildOptions, build_store
from shoal.data.table import Table, number_column

NUM_ROWS, WIDTH, BATCH, ROUNDS = 100_000, 1024, 32, 3
"""205 MB of samples of 1024 token ids of 2 bytes."""
_STARTS = 5

Read = Callable[[np.ndarray], Any]


def measure_stores() -> dict[str, object]:
    """Seconds of a processor per sample, and the start at 90% of an epoch against the start at 0."""
    ids = np.random.default_rng(0).integers(0, 30_000, size=(NUM_ROWS, WIDTH)).astype("<u2")
    ordered = np.arange(NUM_ROWS)
    orders = {"in order": ordered, "at random": permute(0, 0, NUM_ROWS, ordered)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        contenders = _prepare(root, ids)
        found: dict[str, dict[str, list[float]]] = {name: {order: [] for order in orders} for name in contenders}
        for turn in range(ROUNDS):
            for order, rows in orders.items():
                for name in list(contenders)[:: 1 if turn % 2 else -1]:
                    found[name][order].append(_measure(contenders[name], rows))
        starts = {share: _start_seconds(root / "store", share) for share in (0.0, 0.9)}
    medians = {
        name: {order: statistics.median(times) / NUM_ROWS * 1e6 for order, times in own.items()}
        for name, own in found.items()
    }
    for name, own in medians.items():
        ratios = ", ".join(f"{order} {us:.2f} us ({us / medians['memmap'][order]:.2f})" for order, us in own.items())
        print(f"{name:12} {ratios}")
    print(f"start at 90% of an epoch over start at 0: {starts[0.9] / starts[0.0]:.3f}")
    return {
        "samples": NUM_ROWS,
        "bytes": ids.nbytes,
        "batch": BATCH,
        "microseconds": medians,
        "rounds": found,
        "start_seconds": {str(share): seconds for share, seconds in starts.items()},
        "cpus": os.cpu_count(),
    }


def _prepare(root: Path, ids: np.ndarray) -> dict[str, Callable[[], Read]]:
    """Write the data for each contender; how each is opened."""
    path = root / "rows"
    ids.tofile(path)
    contenders: dict[str, Callable[[], Read]] = {
        "memmap": lambda: np.memmap(path, dtype="<u2", mode="r", shape=ids.shape).__getitem__
    }
    for name, codec in (("store", "none"), ("store zstd", "zstd")):
        target = str(root / name.replace(" ", "-"))
        options = BuildOptions(block=BlockOptions(codec=codec))
        build_store([Table.of([number_column("tokens", ids)])], target, options=options)
        contenders[name] = lambda target=target: open_store(target).read
    if importlib.util.find_spec("lance") is not None:
        contenders["lance"] = _prepare_lance(root, ids)
    return contenders


def _prepare_lance(root: Path, ids: np.ndarray) -> Callable[[], Read]:
    import lance
    import pyarrow

    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(ids.reshape(-1)), WIDTH)
    lance.write_dataset(pyarrow.table({"tokens": rows}), str(root / "lance"))

    def open_lance() -> Read:
        dataset = lance.dataset(str(root / "lance"))

        def read(numbers: np.ndarray) -> Any:
            column = dataset.take(numbers.tolist()).column("tokens").combine_chunks()
            return column.flatten().to_numpy().reshape(len(numbers), WIDTH)

        return read

    return open_lance


@contextlib.contextmanager
def _processor_seconds() -> Iterator[list[float]]:
    passed: list[float] = []
    start = time.process_time()
    yield passed
    passed.append(time.process_time() - start)


def _measure(opened: Callable[[], Read], rows: np.ndarray) -> float:
    with _processor_seconds() as passed:
        read = opened()
        for start in range(0, len(rows), BATCH):
            read(rows[start : start + BATCH])
    return passed[0]


_START = """
import sys, time
from shoal.data.build import build_splits
from shoal.data.config import StoreConfig
from shoal.data.loading.loader import Loader
from shoal.data.order import Position
start = time.process_time()
data = build_splits(StoreConfig(path=sys.argv[1], sequence=1024, tokens="tokens", validation=0, test=0), 0)
offset = int(len(data.train) * float(sys.argv[2])) // 32 * 32
loader = Loader(data.train, global_batch=32, micro_batch=32, seed=1, position=Position(offset=offset), prefetch=0)
loader.next()
print(time.process_time() - start)
loader.close()
"""


def _start_seconds(store: Path, share: float) -> float:
    """Processor time from opening the store to the first batch at a place of the epoch, in a process of its own."""
    target = store.with_name("tokens")
    if not target.exists():
        ids = np.random.default_rng(1).integers(0, 30_000, size=NUM_ROWS * WIDTH // 4).astype("<u2")
        build_store([Table.of([number_column("tokens", ids)])], str(target))
    times = []
    for _ in range(_STARTS):
        command = [sys.executable, "-c", _START, str(target), str(share)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        times.append(float(done.stdout))
    return statistics.median(times)
