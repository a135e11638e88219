import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from shoal.core.config import read_toml

FOLDER = Path(__file__).parents[3] / "benchmarks" / "convergence"


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main")
    for name in ("main", "plot"):
        del sys.modules[name]


def test_every_run_sees_the_same_samples_and_every_control_makes_as_many_updates_as_what_it_is_compared_with(
    convergence,
):
    recipe = read_toml(convergence.ROOT / convergence.RECIPE)
    runs = convergence.contenders(recipe)

    assert {run.batch * run.steps for run in runs.values()} == {
        recipe["train"]["global_batch"] * recipe["train"]["steps"]
    }
    compared = [run for run in runs.values() if run.control]
    assert len(compared) == 3
    assert all(run.updates == runs[run.control].updates for run in compared)
    assert all(run.steps % convergence.EVALUATIONS == 0 for run in runs.values())


def test_a_curve_has_each_evaluation_of_the_validation_split_once_by_samples(convergence, tmp_path: Path):
    (tmp_path / "events").mkdir()
    events = [(1200, "validation", 1.5), (100, "validation", 2.5), (1200, "validation", 1.5), (1200, "test", 9.0)]
    lines = [{"kind": "evaluated", "step": step, "split": split, "loss": loss} for step, split, loss in events]
    (tmp_path / "events/rank-000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = convergence.contenders(read_toml(convergence.ROOT / convergence.RECIPE))["1f1b-8"]

    assert convergence.curve(run, tmp_path) == [(800, 2.5), (9600, 1.5)]
    assert convergence.curve(run, tmp_path / "not run yet") == []


def test_a_loss_too_far_above_or_below_its_control_is_not_near(convergence):
    assert [convergence.is_near(ratio) for ratio in (0.979, 0.981, 1.0199, 1.021)] == [False, True, True, False]


def test_labels_keep_their_order_and_do_not_overlap(convergence):
    spread = sys.modules["plot"].spread

    assert spread([10.0, 100.0], 15) == [10.0, 100.0]
    assert spread([52.0, 50.0, 51.0], 15) == [66.0, 36.0, 51.0]
    # Once the lower two have moved apart, the upper of them touches the first.
    assert spread([0.0, 16.0, 20.0], 15) == [-3.0, 12.0, 27.0]


def test_the_readme_and_the_figures_show_the_newest_results(convergence):
    results = json.loads(max((FOLDER / "results").glob("*.json")).read_text())
    figures = convergence.figures(results)

    assert convergence.as_markdown(results) in (FOLDER / "README.md").read_text()
    assert {path: path.read_text() for path in figures} == figures
    assert all(ElementTree.fromstring(text) is not None for text in figures.values())
