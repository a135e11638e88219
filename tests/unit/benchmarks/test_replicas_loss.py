"""How losses are judged beside dense and one replica alone, and how counts become bytes that are sent: told numbers, no run."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from shoal.comm.trafficcounter import Traffic

FOLDER = Path(__file__).parents[3] / "benchmarks" / "replicas_loss"
MODULES = ("main", "contenders", "plot", "sentbytes")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main")
    for name in MODULES:
        sys.modules.pop(name, None)


def rows(**losses: list[float]) -> dict[str, dict]:
    sent = {"dense": 1000, "alone": 0, "int8": 260, "diloco": 50}
    names = {"dense": "dense", "alone": "one replica alone", "int8": "int8", "diloco": "diloco:20"}
    return {
        names[name]: {"losses": dict(enumerate(given)), "loss": given[0], "sent_per_step": sent[name]}
        for name, given in losses.items()
    }


def test_a_loss_is_judged_beside_dense_of_the_same_seed_and_by_the_gap_that_it_closes(benchmark):
    found = benchmark.judge(rows(dense=[2.0, 2.2], alone=[3.0, 3.2], int8=[2.001, 2.204], diloco=[2.5, 2.7]), 300)
    assert found["int8"]["over_dense"] == 0.0025 and found["int8"]["over_dense_by_seed"] == [0.001, 0.004]
    assert not found["int8"]["is_met"] and found["diloco:20"]["closes"] == 0.5 and "bar" not in found["diloco:20"]
    found = benchmark.judge(rows(dense=[2.0], alone=[3.0], int8=[2.0], diloco=[2.5]), 1000)
    assert found["diloco:20"]["is_met"] and "bar" not in found["int8"]
    found = benchmark.judge(rows(dense=[2.0], alone=[3.0], diloco=[2.61]), 1000)
    assert not found["diloco:20"]["is_met"]


def test_a_gap_that_is_closed_with_more_than_a_twentieth_of_the_bytes_does_not_count(benchmark):
    given = rows(dense=[2.0], alone=[3.0], diloco=[2.0])
    given["diloco:20"]["sent_per_step"] = 60
    assert not benchmark.judge(given, 1000)["diloco:20"]["is_met"]


def test_counts_become_what_a_rank_of_four_sends(benchmark):
    sent = importlib.import_module("sentbytes").sent
    counted = Traffic(calls=1, num_bytes=400)
    assert sent("all_reduce", counted, 4, is_gossip=False) == 600
    assert sent("all_gather", counted, 4, is_gossip=False) == sent("all_to_all", counted, 4, is_gossip=False) == 300
    assert sent("all_to_all", counted, 4, is_gossip=True) == 400


def test_the_figure_has_a_dot_for_every_row(benchmark):
    found = {"300": benchmark.judge(rows(dense=[2.0], alone=[3.0], int8=[2.1], diloco=[2.5]), 300)}
    drawn = ElementTree.fromstring(benchmark.draw_svg(found))
    assert len(drawn.findall(".//{*}circle")) == 4


def test_a_row_is_added_beside_those_that_are_known_and_judged_with_them(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    titles = [f"{steps} steps{model}" for steps in (benchmark.SHORT, benchmark.LONG) for model in benchmark.RECIPES]
    known = {"steps": {title: rows(dense=[2.0], alone=[3.0]) for title in titles}}
    for row in known["steps"][titles[0]].values():
        row["losses"] = {str(seed): row["loss"] for seed in (1, 2)}
    told = {1: 2.04, 2: 2.06}

    def train(_contender: object, _recipe: str, _steps: int, seed: int, _run_dir: Path) -> dict[str, object]:
        return {"loss": told[seed], "sent_per_step": 200, "counted": {}, "curve": []}

    monkeypatch.setattr(benchmark, "train", train)
    found = benchmark.measure(tmp_path, [1, 2], ["powersgd:8"], known)["steps"]
    assert list(found[titles[0]]) == ["dense", "one replica alone", "powersgd:8"]
    added = found[titles[0]]["powersgd:8"]
    assert added["over_dense"] == 0.05 and added["is_met"] and added["share_of_bytes"] == 0.2
    assert all("powersgd:8" not in found[title] for title in titles[1:])
