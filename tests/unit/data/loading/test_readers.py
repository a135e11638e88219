"""Threads that load side by side: the order stays, memory is bounded, threads come with waiting, errors and ends are told."""

import itertools
import threading
import time

import numpy as np
import pytest

from shoal.core.errors import RunError
from shoal.data.loading.loader import Loader
from shoal.data.loading.readers import Readers
from shoal.data.sources.arrays import ArraySource


def test_batches_come_in_order_whoever_is_quicker_and_threads_come_with_waiting():
    def load(number):
        time.sleep(0.02 if number % 3 == 0 else 0.004)
        return number * 10

    readers = Readers(iter(range(100)), load, depth=2, most=4)
    try:
        assert [readers.next(10.0) for _ in range(60)] == [number * 10 for number in range(60)]
        assert readers.num_readers == 4
        assert readers.most_held <= 2 + 4
    finally:
        readers.close()


def test_what_is_quick_has_one_thread():
    readers = Readers(itertools.count(), lambda number: number, depth=2)
    for number in range(20):
        with readers._change:
            assert readers._change.wait_for(lambda number=number: number in readers._done, timeout=10)
        assert readers.next(10.0) == number
    assert readers.num_readers == 1
    readers.close()


def test_nothing_is_loaded_beyond_the_depth_until_a_batch_is_taken():
    loaded, readers = [], None
    readers = Readers(itertools.count(), lambda number: loaded.append(number) or number, depth=2)
    with readers._change:
        assert readers._change.wait_for(lambda: len(readers._done) == 3, timeout=10)
        assert not readers._change.wait_for(lambda: len(readers._done) > 3, timeout=0.05)
    assert loaded == [0, 1, 2]
    readers.close()


def test_an_error_comes_at_its_place_and_stays():
    def load(number):
        if number == 3:
            raise OSError("no disk")
        return number

    readers = Readers(iter(range(9)), load, depth=4)
    assert [readers.next(10.0) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="no disk"):
            readers.next(10.0)
    readers.close()
    with pytest.raises(RunError, match="after close"):
        readers.next(1.0)


def test_a_load_that_hangs_is_told_and_does_not_hang_close():
    gate = threading.Event()
    readers = Readers(iter(range(9)), lambda number: gate.wait(20) and number, depth=1)
    with pytest.raises(RunError, match=r"waited 0.05 s for the next batch"):
        readers.next(0.05)
    readers.close()
    gate.set()


def test_a_loader_of_a_source_that_waits_reads_the_same_with_many_threads():
    class Slow(ArraySource):
        waits_for_storage = False

        def collate(self, ids):
            if self.waits_for_storage:
                time.sleep(0.003 * (int(ids[0]) % 4))
            return super().collate(ids)

    def read(waits):
        source = Slow((np.arange(97)[:, None],), np.arange(97), rows=range(97), uniform_weight=1)
        source.waits_for_storage = waits
        loader = Loader(source, global_batch=6, micro_batch=3, seed=1)
        try:
            found = [loader.next() for _ in range(40)]
            return found, loader._readers
        finally:
            loader.close()

    (plain, none), (threaded, readers) = read(False), read(True)
    assert none is None and readers.num_readers > 1
    for one, other in zip(plain, threaded, strict=True):
        assert one.position == other.position
        for mine, theirs in zip(one.microbatches, other.microbatches, strict=True):
            assert mine.sample_ids.tolist() == theirs.sample_ids.tolist() == theirs.inputs[0][:, 0].tolist()
