"""Bugs of loading and of counting, planted in the ranks of a run."""

import os
import time
from dataclasses import replace

from shoal.data.loading.parts import Share
from shoal.data.receipt import Counted
from shoal.data.sources.arrays import ArraySource as Source
from shoal.engine.batches import receipt
from shoal.engine.hooks import Hook

STEP = 2


class SampleBugs(Hook):
    """Plants what ``SAMPLE_BUG`` says.

    ``lose`` and ``repeat``: of the last rank's third batch a sample; ``forget``: a resume has no sum; ``twice``: each rank
    counts, and not each replica.
    """

    def on_attach(self, model):
        bug = os.environ.get("SAMPLE_BUG", "")
        is_last = model.world.rank == model.world.size - 1
        if bug in ("lose", "repeat") and is_last:
            _spoil_batches(bug)
        if bug == "slow" and is_last:
            _load_slowly()
        if bug == "forget":
            honest = receipt.taken_up
            receipt.taken_up = lambda state, **place: replace(honest(state, **place), rows=0, total=0)
        if bug == "twice":
            receipt.add_replicas = lambda parts: sum((part.counted for part in parts), Counted())


def _spoil_batches(bug):
    honest, steps = Share.cut, iter(range(10**9))

    def cut(self, ids):
        found = honest(self, ids)
        if next(steps) == STEP:
            last = found[-1].copy()
            found[-1] = last[:-1] if bug == "lose" else last
            found[-1][0] = found[-1][0] if bug == "lose" else last[1]
        return found

    Share.cut = cut


def _load_slowly():
    honest = Source.collate

    def collate(self, ids):
        time.sleep(0.02)
        return honest(self, ids)

    Source.collate = collate
