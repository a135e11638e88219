"""A step of token samples beside the loaders that people use: processor time for a shuffled batch, one process, no model.

Shoal reads the token file and, in another turn, the store that was built from it; torch's ``DataLoader`` reads the same memory
map sample by sample, as a map-style dataset does, and with batches read at once (``__getitems__``), its best case; litData, where
it is installed, its own chunks. Turns alternate; medians count.
"""

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data.build import build_splits
from shoal.data.config import StoreConfig, TokensConfig
from shoal.data.loading.loader import Loader
from shoal.data.order import Position
from shoal.data.store.writer import build_store
from shoal.data.table import Table, number_column

SAMPLES, LENGTH, BATCH, STEPS, ROUNDS = 20_000, 1024, 32, 300, 5

Take = Callable[[], Any]


class _Windows(torch.utils.data.Dataset):
    """Windows of a memory map of token ids, one at a time."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(place) * LENGTH
        window = torch.from_numpy(self._ids[start : start + LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


class _BatchedWindows(_Windows):
    """The same, with all samples of a batch read at once."""

    def __getitems__(self, places: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        starts = np.asarray(places)[:, None] * LENGTH + np.arange(LENGTH + 1)
        windows = torch.from_numpy(self._ids[starts].astype(np.int64))
        return [(windows[:, :-1], windows[:, 1:])]


def measure_steps() -> dict[str, object]:
    """Milliseconds of a processor for a step of each loader, and what Shoal's is of the others'."""
    torch.set_num_threads(1)
    ids = np.random.default_rng(0).integers(0, 30_000, size=SAMPLES * LENGTH + 1).astype("<u2")
    with tempfile.TemporaryDirectory() as folder:
        contenders = _prepare(Path(folder), ids)
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(ROUNDS):
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                found[name].append(_measure(contenders[name]))
    medians = {name: statistics.median(times) * 1000 for name, times in found.items()}
    for name, ms in medians.items():
        print(f"{name:28} {ms:7.3f} ms a step, of which Shoal's is {medians['shoal'] / ms:.2f}")
    return {
        "batch": BATCH,
        "length": LENGTH,
        "steps": STEPS,
        "milliseconds": medians,
        "rounds": found,
        "cpus": os.cpu_count(),
    }


def _prepare(root: Path, ids: np.ndarray) -> dict[str, Callable[[], Take]]:
    path, store = root / "ids.npy", root / "store"
    np.save(path, ids)
    build_store([Table.of([number_column("tokens", ids)])], str(store))
    shared = {"sequence": LENGTH, "validation": 0.0, "test": 0.0}
    configs = {
        "shoal": TokensConfig(path=str(path), vocab=30_000, **shared),
        "shoal, store": StoreConfig(path=str(store), **shared),
    }
    contenders: dict[str, Callable[[], Take]] = {
        name: (lambda config=config: _open_shoal(config)) for name, config in configs.items()
    }
    contenders["torch DataLoader"] = lambda: _open_torch(_Windows(np.load(path, mmap_mode="r")))
    contenders["torch DataLoader, batched"] = lambda: _open_torch(_BatchedWindows(np.load(path, mmap_mode="r")))
    if importlib.util.find_spec("litdata") is not None:
        contenders["litData"] = _prepare_litdata(root, ids)
    return contenders


def _open_shoal(config: Any) -> Take:
    data = build_splits(config, 0)
    return Loader(data.train, global_batch=BATCH, micro_batch=BATCH, seed=1, position=Position(), prefetch=0).next


def _open_torch(dataset: _Windows) -> Take:
    collate = (lambda found: found[0]) if isinstance(dataset, _BatchedWindows) else None
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=collate)
    return _endless(loader).__next__


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _prepare_litdata(root: Path, ids: np.ndarray) -> Callable[[], Take]:
    import litdata

    target = root / "litdata"
    writer = litdata.streaming.cache.Cache(
        str(target), chunk_bytes="64MB", item_loader=litdata.streaming.item_loader.TokensLoader(block_size=LENGTH + 1)
    )
    # Its windows do not overlap by the one id that is the last target, so that it has as many samples.
    rows = np.concatenate([ids[:-1].reshape(SAMPLES, LENGTH), ids[LENGTH::LENGTH, None]], axis=1)
    for place in range(SAMPLES):
        writer[place] = torch.from_numpy(rows[place].astype(np.int64))
    writer.done()
    writer.merge(1)

    def open_litdata() -> Take:
        windows = litdata.streaming.item_loader.TokensLoader(block_size=LENGTH + 1)
        dataset = litdata.StreamingDataset(str(target), item_loader=windows, shuffle=True)
        loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)
        return _endless(loader).__next__

    return open_litdata


def _measure(opened: Callable[[], Take]) -> float:
    take = opened()
    for _ in range(20):
        take()
    start = time.process_time()
    for _ in range(STEPS):
        take()
    return (time.process_time() - start) / STEPS
