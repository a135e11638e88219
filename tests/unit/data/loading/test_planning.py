"""A loader tells the cache of its source what comes next, and its steps are those that it would have had anyway."""

from collections.abc import Sequence

import numpy as np
import pytest

from shoal.core.events import DataCache
from shoal.data.loading.parts import Share, build_order, order_parts
from shoal.data.loading.planning import plan_ahead
from shoal.data.order import Position
from shoal.data.source import Items, SampleIds


class Rows:
    """A source of 40 samples, two in a block, that keeps what it is told."""

    uniform_weight = 1

    def __init__(self, *, is_cached: bool = True) -> None:
        self.is_cached = is_cached
        self.own: list[list[int]] = []
        self.everyone: list[list[int]] = []

    def __len__(self) -> int:
        return 40

    def collate(self, ids: SampleIds) -> Items:
        raise AssertionError("nothing is loaded here")

    def plan_reads(self, own: Sequence[SampleIds], everyone: Sequence[SampleIds]) -> int:
        self.own += [[int(one) for one in ids] for ids in own]
        self.everyone += [[int(one) for one in ids] for ids in everyone]
        return sum(len(np.unique(np.asarray(ids) // 2)) for ids in own)

    def cache_report(self) -> DataCache | None:
        names = (
            "memory_hits",
            "disk_hits",
            "fetches",
            "memory_bytes",
            "disk_bytes",
            "fetched_bytes",
            "refused",
            "not_kept",
        )
        return DataCache(fetch_seconds=0, wait_seconds=0, **dict.fromkeys(names, 0)) if self.is_cached else None


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_plan_is_what_is_read_and_changes_no_step(is_cached: bool) -> None:
    source, share, start = Rows(is_cached=is_cached), Share(replica=1, num_replicas=2), Position(epoch=0, offset=8)
    order = build_order(source, global_batch=8, seed=3)
    plain = order_parts(order, start, share)
    planned = plan_ahead(source, lambda part: order_parts(order, start, part), share)
    read: list[list[int]] = []
    for _ in range(40):
        one, other = next(plain), next(planned)
        assert one.position == other.position
        assert [ids.tolist() for ids in one.microbatches] == [ids.tolist() for ids in other.microbatches]
        read += [ids.tolist() for ids in one.microbatches]
    if not is_cached:
        assert source.own == []
        return
    assert source.own[: len(read)] == read
    assert len(source.own) > 1000, "it reaches far ahead"
    assert len(source.own) == len(source.everyone)
    for mine, all_ranks in zip(source.own, source.everyone, strict=True):
        assert set(mine) < set(all_ranks)
        assert len(all_ranks) == 8
