"""The loader: the global order for any number of replicas, positions that can be resumed, failures that reach the caller."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import shoal.data.loading.loader as loader_module
from shoal.core.errors import RequestError, RunError
from shoal.data.loading.loader import Loader, StepBatch
from shoal.data.order import Position
from shoal.data.source import Items, SampleIds, Source
from shoal.data.sources.arrays import ArraySource
from support.processes.instruction_count import instructions

torch.set_num_threads(1)
WAYS = [{"prefetch": 0}, {"prefetch": 2}, {"prefetch": 2, "workers": 2}]


def _source(size: int = 23, uniform_weight: int | None = 1) -> ArraySource:
    targets = np.arange(size)
    return ArraySource((targets * 10,), targets, rows=range(size), uniform_weight=uniform_weight)


@contextmanager
def _loader(source: Source | None = None, **values: Any) -> Iterator[Loader]:
    loader = Loader(source or _source(), **{"global_batch": 6, "micro_batch": 2, "seed": 3, **values})
    try:
        yield loader
    finally:
        loader.close()


def _ids(batch: StepBatch) -> list[int]:
    return [int(i) for microbatch in batch.microbatches for i in microbatch.sample_ids]


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_comes_once_per_epoch_with_its_own_tensors(way: dict[str, int]) -> None:
    with _loader(**way) as loader:
        for epoch in range(2):
            batches = [loader.next() for _ in range(4)]
            assert [batch.num_samples for batch in batches] == [6, 6, 6, 5]
            assert sorted(i for batch in batches for i in _ids(batch)) == list(range(23))
            assert batches[-1].position == Position(epoch=epoch + 1)
            for batch in batches:
                for microbatch in batch.microbatches:
                    assert microbatch.targets.tolist() == microbatch.sample_ids.tolist()
                    assert microbatch.inputs[0].tolist() == [10 * i for i in microbatch.sample_ids]
                    assert microbatch.sample_ids.dtype == np.int64


def test_all_ways_load_the_same() -> None:
    seen = []
    for way in WAYS:
        with _loader(**way) as loader:
            seen.append([_ids(loader.next()) for _ in range(9)])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 8])
def test_the_replicas_together_read_the_global_batch_in_order(num_replicas: int) -> None:
    with _loader(prefetch=0) as alone:
        expected = [_ids(alone.next()) for _ in range(8)]
    parts: list[list[int]] = [[] for _ in expected]
    for replica in range(num_replicas):
        with _loader(prefetch=0, replica=replica, num_replicas=num_replicas) as loader:
            for part in parts:
                part += _ids(loader.next())
    assert parts == expected


def test_a_replica_without_a_sample_gets_an_empty_batch() -> None:
    with _loader(_source(2), global_batch=2, replica=2, num_replicas=3) as loader:
        batch = loader.next()
    assert (batch.microbatches, batch.num_samples, batch.local_weight, batch.total_weight) == ((), 2, 0.0, 2.0)


def test_weights_of_the_microbatch_the_replica_and_the_global_batch() -> None:
    with _loader(_source(uniform_weight=7), replica=1, num_replicas=4, global_batch=10) as loader:
        batch = loader.next()
    assert [microbatch.weight for microbatch in batch.microbatches] == [7.0, 7.0]
    assert (batch.local_weight, batch.total_weight) == (14.0, 70.0)
    with _loader(_source(uniform_weight=None)) as loader:
        batch = loader.next()
    assert (batch.local_weight, batch.total_weight) == (6.0, None)


@pytest.mark.parametrize("way", WAYS)
def test_the_position_is_of_what_was_handed_out_and_resumes_there(way: dict[str, int]) -> None:
    with _loader(**way) as loader:
        batches = [loader.next() for _ in range(12)]
    assert batches[0].position == Position(epoch=0, offset=6)
    for done in (1, 4, 5, 9):
        with _loader(**way, position=batches[done - 1].position) as resumed:
            assert [_ids(resumed.next()) for _ in range(12 - done)] == [_ids(batch) for batch in batches[done:]]


def test_a_position_beyond_the_data_and_no_data_are_refused() -> None:
    with pytest.raises(RequestError, match="is sample 23 of an epoch and the data has 23 samples"):
        Loader(_source(), global_batch=2, micro_batch=2, position=Position(offset=23))
    with pytest.raises(RequestError, match="has 0 samples"):
        Loader(_source(0), global_batch=2, micro_batch=2)


def _prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def _join_prefetching() -> None:
    for thread in _prefetching():
        thread.join(timeout=10)


class Custom:
    """A source whose collate is the test's."""

    uniform_weight = 1

    def __init__(self, collate: Callable[[SampleIds], Items]) -> None:
        self.collate = collate

    def __len__(self) -> int:
        return 100


def _plain(ids: SampleIds) -> Items:
    return Items(inputs=(), targets=torch.tensor(np.asarray(ids)), weight=len(ids))


def test_prefetching_goes_as_far_as_told_and_no_farther() -> None:
    loads = threading.Semaphore(0)
    count = [0]

    def collate(ids: SampleIds) -> Items:
        count[0] += 1
        loads.release()
        return _plain(ids)

    with _loader(Custom(collate), prefetch=3, micro_batch=6) as loader:
        loader.next()  # The first load is not ahead of anything: it shows whether any may be.
        for _ in range(5):  # That one, three in the queue and one that waits to be put.
            assert loads.acquire(timeout=10)
        assert not loads.acquire(timeout=0.2)
        loader.next()
        assert loads.acquire(timeout=10)
        assert count[0] == 6


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_source_reaches_the_caller(way: dict[str, int]) -> None:
    def collate(ids: SampleIds) -> Items:
        raise ZeroDivisionError("in the source")

    with _loader(Custom(collate), **way) as loader:
        for _ in range(2 if way == {"prefetch": 2} else 1):
            with pytest.raises(ZeroDivisionError, match="in the source"):
                loader.next()


def test_batches_before_an_error_are_still_handed_out() -> None:
    calls = [0]

    def collate(ids: SampleIds) -> Items:
        calls[0] += 1
        if calls[0] == 3:
            raise ZeroDivisionError
        return _plain(ids)

    with _loader(Custom(collate), prefetch=2, micro_batch=6) as loader:
        loader.next()
        loader.next()
        with pytest.raises(ZeroDivisionError):
            loader.next()


def test_a_source_that_hangs_is_an_error_after_the_deadline_and_does_not_hang_close() -> None:
    forever = threading.Event()

    def collate(ids: SampleIds) -> Items:
        forever.wait(60)
        return _plain(ids)

    loader = Loader(Custom(collate), global_batch=2, micro_batch=2, deadline_s=0.1)
    with pytest.raises(RunError, match=r"waited 0\.1 s for the next batch"):
        loader.next()
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 5
    forever.set()
    _join_prefetching()


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    loader = Loader(_source(), global_batch=2, micro_batch=2)
    loader.next()
    assert len(_prefetching()) == 1
    loader.close()
    loader.close()
    assert _prefetching() == []
    with pytest.raises(RunError, match="after close"):
        loader.next()


def test_close_ends_the_workers() -> None:
    known = {process.pid for process in psutil.Process().children(recursive=True)}
    loader = Loader(_source(), global_batch=2, micro_batch=2, workers=2)
    loader.next()
    started = [process for process in psutil.Process().children(recursive=True) if process.pid not in known]
    assert len(started) >= 2
    loader.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    "end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0)], ids=["killed", "left"]
)
def test_a_worker_that_ends_is_an_error_long_before_the_deadline(end: Callable[[], None]) -> None:
    def collate(ids: SampleIds) -> Items:
        end()
        return _plain(ids)

    with (
        _loader(Custom(collate), workers=1) as loader,
        pytest.raises(RunError, match="loader process failed: DataLoader worker"),
    ):
        loader.next()


ORPHANS = """
import os, sys
import numpy as np
from shoal.data.sources.arrays import ArraySource
from shoal.data.loading.loader import Loader
rows = np.arange(1000)
loader = Loader(ArraySource((rows,), rows, rows=range(1000), uniform_weight=1), global_batch=2, micro_batch=2, workers=2)
loader.next()
print("ready", flush=True)
sys.stdin.read()
"""


def test_workers_die_when_their_rank_is_killed() -> None:
    rank = subprocess.Popen([sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        workers = psutil.Process(rank.pid).children(recursive=True)
        assert len(workers) >= 2
        rank.kill()
        # torch's own watchdog looks every 5 s; the kernel needs no time at all.
        _, alive = psutil.wait_procs(workers, timeout=3)
        assert alive == []
    finally:
        rank.kill()
        rank.communicate(timeout=10)


def test_a_batch_is_handed_over_with_no_more_work_for_more_samples() -> None:
    """A line of Python for each sample would be milliseconds for a batch; the samples are gathered in one call."""
    work = []
    for size in (64, 1024):
        with _loader(_source(100_000), global_batch=size, micro_batch=size, prefetch=0) as loader:
            loader.next()
            work.append(instructions(loader.next))
    # A line for each would be 960 more; what the interpreter does now and then by itself is a hundred or two.
    assert work[1] < work[0] + 480


@pytest.mark.parametrize(("worth_s", "num_threads"), [(0.0, 1), (3600.0, 0)], ids=["slow", "quick"])
def test_a_thread_is_kept_for_a_slow_source_and_ended_for_a_quick_one(
    worth_s: float, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What counts as slow is moved instead of the clock: a loaded machine must not decide this test.
    monkeypatch.setattr(loader_module, "_WORTH_A_THREAD_S", worth_s)
    with _loader(Custom(_plain), prefetch=2, micro_batch=6) as loader:
        seen = [loader.next().position for _ in range(30)]
        assert len(_prefetching()) == num_threads
    with _loader(Custom(_plain), prefetch=0, micro_batch=6) as loader:
        assert [loader.next().position for _ in range(30)] == seen, "ending the thread neither repeats nor skips"


def test_data_that_draws_random_numbers_is_not_loaded_ahead() -> None:
    def noisy(ids: SampleIds) -> Items:
        items = _plain(ids)
        return Items(inputs=(torch.rand(1),), targets=items.targets, weight=items.weight)

    def draw() -> list[float]:
        torch.manual_seed(1)
        with _loader(Custom(noisy), prefetch=2, micro_batch=6) as loader:
            found = []
            for _ in range(20):
                found.append(float(loader.next().microbatches[0].inputs[0].sum()))
                torch.rand(3)  # what a model draws between two batches
            assert loader.draws_random_numbers and not _prefetching()
            return found

    assert draw() == draw()
