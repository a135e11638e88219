"""Training from a store behind a web server that misbehaves: the bits of a local store, and one fetch for two ranks."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from multiproc.test_store_runs import shoal, train
from support.data.webserver import Web, serving


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as found:
        yield found


def _cache_events(run: Path) -> list[dict[str, int]]:
    lines = [line for file in sorted((run / "events").glob("rank-*.jsonl")) for line in file.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["kind"] == "data_cache"]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_from_far_is_the_run_from_here(web: Web, tmp_path: Path) -> None:
    ids, store = tmp_path / "ids.npy", tmp_path / "store"
    np.save(ids, np.random.default_rng(0).integers(0, 200, size=60_000).astype("<u2"))
    shoal("data", "build", ids, store, "--block-bytes", 16384, "--workers", 1)
    blocks = sorted(str(file.relative_to(tmp_path)) for file in (store / "blocks").iterdir())
    here = train(tmp_path / "here", "data.source=store", f"data.path={store}")
    web.files = {str(file.relative_to(tmp_path)): file.read_bytes() for file in store.rglob("*") if file.is_file()}
    web.fail(*["whole"] * 6, "slow", "500", "half", "wrong", "whole", "half", "wrong", "500", "slow")
    far = ("data.source=store", f"data.path={web.address}/store", "data.version=1", "data.cache.disk=1 MiB")
    there = train(tmp_path / "far", *far, f"data.cache.path={tmp_path / 'cache'}", "data.cache.memory=64 KiB")
    assert there == here
    events = _cache_events(tmp_path / "far")
    assert events, "what the cache did is in the events"
    # The command looks at the data before ranks do, with the same folder, so ranks may find blocks there already.
    assert sum(web.asked[block] for block in blocks) <= len(blocks) + 8
    assert sum(event["fetches"] for event in events) <= len(blocks) + 8
    assert sum(event["disk_hits"] + event["memory_hits"] for event in events) > 0


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_table_from_far_is_served_once_to_two_ranks(web: Web, tmp_path: Path) -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    rows = (recipes / "data" / "pumps.csv").read_bytes()
    web.files = {"pumps.csv": rows}
    web.fail("whole", "half", "500", "slow")
    near = ("data.cache.disk=1 MiB", f"data.cache.path={tmp_path / 'cache'}", "data.cache.block=4 KiB")
    hashes = []
    for name, path, more in (("here", recipes / "data" / "pumps.csv", ()), ("far", f"{web.address}/pumps.csv", near)):
        settings = [f"data.path={path}", *more]
        words = [word for one in settings for word in ("--set", one)]
        shoal("train", recipes / "table.toml", "--run-dir", tmp_path / name, *words)
        hashes.append(json.loads((tmp_path / name / "summary.json").read_text())["weights_sha256"])
    assert hashes[0] == hashes[1]
    num_faults = 2
    assert web.asked["pumps.csv"] == -(-len(rows) // 4096) + num_faults
    events = _cache_events(tmp_path / "far")
    assert len(events) == 2 and all(event["disk_bytes"] >= len(rows) for event in events)
    assert all(event["fetches"] == 0 for event in events), "the command has read the rows before its ranks did"
