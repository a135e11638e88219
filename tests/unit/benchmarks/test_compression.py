"""Codecs are compared with a copy in the same rounds, the planner has the shares that were measured, and the page has both."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from shoal.core.compressrule import CompressRule
from shoal.planner.pricing.codecs import SPEEDS

FOLDER = Path(__file__).parents[3] / "benchmarks" / "compression"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main")
    sys.modules.pop("main", None)


def test_a_share_is_of_what_the_copy_reads_and_writes(benchmark):
    seconds = {"copy": [0.5, 1.0], "int8 encode": [4.0, 8.0], "int8 decode": [2.0, 3.0]}
    (row,) = benchmark.summarise(seconds, 10**9, ["int8"])
    assert (row["encode_gb_per_s"], row["encode_share"]) == (1.0, 1 / 16)
    assert (row["decode_gb_per_s"], row["decode_share"]) == (2.0, 1 / 8)


def test_every_codec_is_timed_in_every_round(benchmark):
    found = benchmark.measure(4096, 2, benchmark.CODECS)
    assert len(found) == 1 + 2 * len(benchmark.CODECS)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


def test_the_planner_and_the_page_have_the_newest_results(benchmark):
    newest = json.loads(sorted((FOLDER / "results").glob("*.json"))[-1].read_text())
    for row in newest["codecs"]:
        speed = SPEEDS["sparse" if row["codec"].startswith("sparse:") else CompressRule.parse(row["codec"]).kind]
        told = (row["encode_share"], row["decode_share"])
        assert (speed.encode, speed.decode) == pytest.approx(told, rel=0.05), row["codec"]
    assert benchmark.as_markdown(newest) in (FOLDER / "README.md").read_text()
