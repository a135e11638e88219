"""Parameters that are cached, and gradients that are sent by rows, in a running job: what is claimed, and what it saves."""

import json

import pytest

from shoal.paramserver.worker.client import Client
from support.paramserver.run_in_process import recipe_of, run_alone, run_inside

WORDS = {
    "model": {"build": "support.models.custom_parts:build_bag"},
    "data": {"build": "support.models.custom_parts:build_words"},
    "train": {"steps": 8, "global_batch": 8, "threads": 1, "seed": 3},
    "optim": {"name": "adagrad", "lr": 0.1},
    "checkpoint": {"every": 0},
    "telemetry": {"tensorboard": False},
    "paramserver": {"centers": 1},
}


def traffic(outcome):
    """Bytes that all workers pushed and pulled."""
    events = []
    for path in outcome.run_dir.glob("events/rank-*.jsonl"):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    told = [event for event in events if event["kind"] == "traffic"]
    return sum(event["pushed_bytes"] for event in told), sum(event["pulled_bytes"] for event in told)


def test_an_embedding_sends_the_rows_it_touched_and_trains_to_the_same_bits(tmp_path):
    plan = "ps=2 workers=2 update=bsp backup=1"
    whole = run_inside(tmp_path / "whole", plan, recipe_of(base=WORDS))
    found = run_inside(tmp_path / "rows", plan, recipe_of("paramserver.hot=measured", base=WORDS))
    assert found.sha256 == whole.sha256
    dense = 8 * 2 * (2000 * 16 + 16 * 4 + 4) * 4
    assert traffic(whole)[0] == dense
    # A work unit has at most 12 words, on two servers.
    assert traffic(found)[0] <= 8 * 2 * (12 * (8 + 16 * 4) + (16 * 4 + 4) * 4)


def test_an_embedding_whose_gradient_comes_as_rows_trains_in_one_process_too(tmp_path):
    """Everywhere but on a worker of parameter servers it ended a run in the first step."""
    rows = {**WORDS, "model": {"build": "support.models.custom_parts:build_rows"}}
    alone = run_alone(recipe_of(base=rows))
    assert alone == run_alone(recipe_of(base=WORDS))
    served = run_inside(tmp_path, "ps=2 workers=1 update=async", recipe_of(base=rows))
    assert served.sha256 == alone
    # A work unit has at most 24 words, on two servers.
    assert traffic(served)[0] <= 8 * (24 * (8 + 16 * 4) + (16 * 4 + 4) * 4)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_words_that_come_again_in_a_batch_are_added_up_as_in_one_process(tmp_path, microbatches):
    """A worker added torch's rows up, which comes to other bits than the whole gradient where three of a row meet."""
    few = {"num_words": 20}
    data = {"build": "support.models.custom_parts:build_words", "args": few}
    rows = {**WORDS, "model": {"build": "support.models.custom_parts:build_rows", "args": few}, "data": data}
    alone = run_alone(recipe_of(base=rows), plan=f"dp=1 microbatches={microbatches}")
    plan = f"ps=2 workers=1 update=async microbatches={microbatches}"
    assert run_inside(tmp_path, plan, recipe_of(base=rows)).sha256 == alone


def test_what_is_cached_is_never_further_behind_than_allowed(tmp_path, monkeypatch):
    honest, reads = Client.pull, []

    async def pull(self, need, bound=None):
        read = await honest(self, need, bound)
        reads.append((self._cache_staleness, read, need))
        return read

    monkeypatch.setattr(Client, "pull", pull)
    plan = "ps=2 workers=2 update=async"
    settings = ["train.steps=24", "paramserver.hot=out.*"]
    fresh = run_inside(tmp_path / "fresh", plan, recipe_of(*settings, base=WORDS))
    cached = run_inside(tmp_path / "cached", plan, recipe_of(*settings, "paramserver.cache_staleness=5", base=WORDS))
    of_cached = [(versions, need) for staleness, versions, need in reads if staleness == 5]
    assert len(of_cached) == 48
    assert all(versions[0] >= need for versions, need in of_cached), "hot parameters have the worker's own writes"
    behind = [versions[0] - versions[1] for versions, _ in of_cached]
    assert max(behind) <= 5
    assert max(behind) >= 3, "and it does use what it has"
    assert traffic(cached)[1] < 0.7 * traffic(fresh)[1]


def test_what_is_measured_to_be_cold_is_cached_and_nothing_else(tmp_path, monkeypatch):
    """It only packed rows: nothing was cached by what was measured, and all but the first server by what was not."""
    honest, reads = Client.pull, []

    async def pull(self, need, bound=None):
        read = await honest(self, need, bound)
        reads.append((self._cached(), read))
        return read

    monkeypatch.setattr(Client, "pull", pull)
    plan = "ps=3 workers=2 update=async"
    settings = ["train.steps=24", "paramserver.hot=measured"]
    fresh = run_inside(tmp_path / "fresh", plan, recipe_of(*settings, base=WORDS))
    assert not any(cached for cached, _ in reads)
    reads.clear()
    cached = run_inside(tmp_path / "cached", plan, recipe_of(*settings, "paramserver.cache_staleness=5", base=WORDS))
    assert reads[0][0] == [] and reads[-1][0] == [1, 2], "before and after it was measured"
    behind = [read[0] - min(read[shard] for shard in found) for found, read in reads if found]
    assert 3 <= max(behind) <= 5
    assert traffic(cached)[1] < 0.7 * traffic(fresh)[1]
