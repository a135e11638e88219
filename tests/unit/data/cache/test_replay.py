"""Policies on the traces of training: against another simulator hit by hit, against the optimum, and the bars of the blend."""

import importlib.util

import pytest

from shoal.core.errors import RequestError
from shoal.data.cache.catalogue import NAMES, build_policy
from shoal.data.cache.replay import fetches_per_block, hits_of, replay
from shoal.data.cache.traces import Trace, build_block_traces, build_traces

TRACES = {trace.name: trace for trace in build_traces(1, num_keys=400, passes=8)}
CAPACITY = 100


def _libcachesim_hits(name: str, trace: Trace, capacity: int) -> list[bool]:
    libcachesim = pytest.importorskip("libcachesim", reason="pip install libcachesim==0.3.5")
    theirs = {"lru": "LRU", "lfu": "LFU", "arc": "ARC", "2q": "TwoQ", "s3fifo": "S3FIFO", "tinylfu": "WTinyLFU"}[name]
    cache, request, hits = getattr(libcachesim, theirs)(capacity, hashpower=12), libcachesim.Request(), []
    request.obj_size = 1
    for key in trace.keys.tolist():
        request.obj_id = key
        hits.append(cache.get(request))
    return hits


@pytest.mark.parametrize("name", ["lru", "lfu", "arc", "2q"])
def test_every_hit_is_the_hit_of_another_simulator(name: str) -> None:
    for trace in TRACES.values():
        ours = list(hits_of(build_policy(name, CAPACITY), trace.keys.tolist()))
        assert ours == _libcachesim_hits(name, trace, CAPACITY), trace.name


@pytest.mark.parametrize("name", ["s3fifo", "tinylfu"])
def test_policies_with_free_details_hit_as_often_as_another_simulator(name: str) -> None:
    # Where the papers leave details open (how counts age, what breaks ties), hit by hit is more than can be asked.
    for trace in build_traces(1)[2:]:
        ours = sum(hits_of(build_policy(name, 250), trace.keys.tolist())) / len(trace.keys)
        theirs = sum(_libcachesim_hits(name, trace, 250)) / len(trace.keys)
        assert ours == pytest.approx(theirs, abs=0.03), trace.name


def test_lru_and_lfu_hit_as_often_as_cachetools() -> None:
    if importlib.util.find_spec("cachetools") is None:
        pytest.skip("pip install cachetools")
    for trace in TRACES.values():
        for name, other in (("lru", "cachetools LRU"), ("lfu", "cachetools LFU")):
            assert replay(name, trace, CAPACITY).hits == pytest.approx(replay(other, trace, CAPACITY).hits, rel=0.01)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_blend_is_as_good_as_the_better_of_the_two(seed: int) -> None:
    ratios = {}
    for trace in build_traces(seed):
        best = max(replay(name, trace, 250).hits for name in ("lru", "mru"))
        ratios[trace.name] = replay("blend", trace, 250).hits / best
    assert sum(ratio >= 0.98 for ratio in ratios.values()) >= 4, ratios
    assert min(ratios.values()) >= 0.9, ratios


def test_nothing_beats_the_optimum_and_the_plan_comes_within_two_hundredths() -> None:
    for trace in [*TRACES.values(), *build_block_traces(1, num_blocks=40, window=8, epochs=2)]:
        capacity = trace.num_keys // 4
        least = replay("belady", trace, capacity).fetches
        found = {name: replay(name, trace, capacity).fetches for name in NAMES}
        assert min(found.values()) >= least, trace.name
        assert found["planned"] <= 1.02 * least, trace.name


def test_what_an_epoch_allows_is_reached_by_those_that_are_meant_for_it() -> None:
    # Nothing comes twice in an epoch, so the share of the keys that fits is the most that can be hit.
    for name, share in (("mru", 0.25), ("planned", 0.25), ("blend", 0.24), ("lru", 0.04)):
        found = replay(name, TRACES["shuffle"], CAPACITY).hit_ratio
        assert found == pytest.approx(share, abs=0.015), name
    assert replay("lru", TRACES["scan"], CAPACITY).hits == 0


def test_fetches_of_blocks_depend_on_the_order_more_than_on_the_policy() -> None:
    full, window = build_block_traces(1, num_blocks=100, window=16)
    assert fetches_per_block(replay("lru", full, 25)) > 20
    assert fetches_per_block(replay("belady", full, 25)) < 14
    assert fetches_per_block(replay("lru", window, 25)) < 1.02


def test_a_policy_of_another_name_is_refused() -> None:
    with pytest.raises(RequestError, match="did you mean 'lru'"):
        build_policy("lruu", 10)
