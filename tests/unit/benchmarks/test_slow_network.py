"""What is made of turns over a slow link: told times and bytes, no host."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "slow_network"
MODULES = ("main", "contenders", "hosts", "pairs")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main")
    for name in MODULES:
        sys.modules.pop(name, None)


def taken(seconds, *, sent=0, counted=0):
    row = {"turns": dict(enumerate(seconds)), "cpu": [0.1], "failed": 0}
    return row | {"payload": [sent, sent], "counted": [counted, counted]}


def test_a_step_is_compared_with_ddps_of_the_same_turn(benchmark):
    found = benchmark.summarise({"ddp": taken([[10.0], [20.0]]), "shoal int8": taken([[2.9], [6.2]])})
    assert found["shoal int8"]["to_ddp"] == 0.3 and found["shoal int8"]["is_met"]
    assert benchmark.summarise({"ddp": taken([[10.0]]), "shoal int8": taken([[3.1]])})["shoal int8"]["is_met"] is False


def test_the_longest_step_of_streaming_is_compared_with_a_local_one(benchmark):
    local = taken([[1.0] * 49 + [20.0]])
    for longest, is_met in ((1.4, True), (1.6, False)):
        streaming = taken([[1.0, longest, 1.0]])
        found = benchmark.summarise({"ddp": taken([[20.0]]), benchmark.LOCAL: local, benchmark.STREAMING: streaming})
        assert found[benchmark.STREAMING]["longest_to_local"] == longest
        assert found[benchmark.STREAMING]["is_met"] is is_met


def test_bytes_that_nobody_counted_are_seen(benchmark):
    for sent, is_metered in ((1_002_000, True), (1_100_000, False), (900_000, False)):
        row = taken([[1.0]], sent=sent, counted=1_000_000)
        found = benchmark.summarise({"ddp": taken([[20.0]]), "shoal int8": row})
        assert found["shoal int8"]["is_metered"] is is_metered


def test_headers_are_no_payload(benchmark):
    sent = importlib.import_module("hosts").Sent
    before, after = sent(num_bytes=1000, packets=2), sent(num_bytes=1000 + 3 * 1514, packets=5)
    assert after.since(before).payload == 3 * 1448
