"""A scan of a file in HDFS by Shoal beside the bare client, hdfs-native: bytes a second by the clock, and processor time.

HDFS runs here with both daemons, as the tests start it; what it needs is fetched by ``python tests/support/hadoop/install.py``.
Where that or hdfs-native is missing nothing is measured. Turns alternate; medians count.
"""

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from shoal.data.storage.config import StorageConfig
from shoal.data.storage.opening import open_storage
from support.hadoop.install import what_is_missing
from support.hadoop.servers import hdfs

NUM_BYTES, PIECE, ROUNDS = 256 << 20, 8 << 20, 7


def measure_hdfs() -> dict[str, object]:
    """Seconds of a scan in pieces of 8 MiB, by each."""
    missing = what_is_missing() or (
        None if importlib.util.find_spec("hdfs_native") else "needs hdfs-native: pip install 'shoal[hdfs]'"
    )
    if missing is not None:
        print(f"not measured: {missing}")
        return {"not measured": missing}
    with tempfile.TemporaryDirectory() as folder, hdfs(Path(folder) / "run") as cluster:
        storage, _ = open_storage(cluster.native, StorageConfig())
        storage.create("scan/rows.bin", np.random.default_rng(0).bytes(NUM_BYTES))
        contenders = {
            "hdfs-native": _bare(cluster.native),
            "shoal": lambda at: storage.read("scan/rows.bin", at, at + PIECE),
        }
        wall: dict[str, list[float]] = {name: [] for name in contenders}
        processor: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(ROUNDS):
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                clock, cpu = time.perf_counter(), time.process_time()
                for at in range(0, NUM_BYTES, PIECE):
                    assert len(contenders[name](at)) == PIECE
                wall[name].append(time.perf_counter() - clock)
                processor[name].append(time.process_time() - cpu)
    rates = {name: NUM_BYTES / statistics.median(times) / 1e6 for name, times in wall.items()}
    seconds = {name: statistics.median(times) for name, times in processor.items()}
    for name in contenders:
        print(f"{name:12} {rates[name]:7.0f} MB/s, {seconds[name]:.3f} s of a processor")
    print(f"shoal over hdfs-native: {rates['shoal'] / rates['hdfs-native']:.2f} of the rate, "
          f"{seconds['shoal'] / seconds['hdfs-native']:.2f} of the processor time")  # fmt: skip
    return {"bytes": NUM_BYTES, "megabytes_per_s": rates, "processor_s": seconds, "wall": wall, "processor": processor}


def _bare(address: str) -> Callable[[int], Any]:
    import hdfs_native

    client = hdfs_native.Client(address)
    reader = client.read("/scan/rows.bin")
    return lambda at: reader.read_range(at, PIECE)
