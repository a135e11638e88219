"""What goes beside an export: rows of JSON become the bits that training saw, and a folder that was altered is refused."""

import csv
import json
import shutil

import numpy as np
import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.data.config import TableConfig
from shoal.data.fitted import keep_fitted
from shoal.data.prepare import prepare_rows
from shoal.data.rawrows import export_preparation, load_preparation

STEPS = [
    {"step": "fill", "columns": ["x", "y"], "how": "model"},
    {"step": "vocabulary", "columns": ["word"]},
    {"step": "date", "columns": ["when"], "parts": ["hour"]},
    {"step": "scale", "columns": ["x", "y", "when_hour"]},
    {"step": "filter", "columns": ["x"], "how": "zscore"},
]


@pytest.fixture
def raw(tmp_path):
    """The lines of a file, as a client would send them."""
    draws = np.random.default_rng(0)
    lines = ["x,y,word,when,who,label"]
    for row in range(90):
        hole = "" if row % 7 == 0 else f"{draws.normal():.4f}"
        lines.append(
            f"{draws.normal():.4f},{hole},w{row % 4},2026-01-0{1 + row % 5}T{row % 24:02}:00,{row // 3},{'ab'[row % 2]}"
        )
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    rows = []
    for line in csv.DictReader(lines):
        numbers = {name: float(line[name]) if line[name] else None for name in ("x", "y")}
        rows.append(numbers | {"word": line["word"], "when": line["when"]})
    return rows


def config_of(tmp_path, **more):
    given = {"source": "table", "path": str(tmp_path / "rows.csv"), "validation": 0.2, "test": 0.2, "prepare": STEPS}
    given |= {"inputs": ["x", "y", "word", "when_hour"], "target": "label", "cut": {"by": "user", "key": "who"}} | more
    return validate(TableConfig, given, origin="a.toml")


@pytest.fixture
def exported(raw, tmp_path):
    """The folder of an export, of a run that is gone."""
    (tmp_path / "run").mkdir()
    (tmp_path / "out").mkdir()
    keep_fitted(config_of(tmp_path), tmp_path / "run")
    assert export_preparation(tmp_path / "run" / "data", tmp_path / "out") == tmp_path / "out" / "prepare"
    shutil.rmtree(tmp_path / "run")
    return tmp_path / "out" / "prepare"


def test_rows_of_json_become_what_the_run_evaluates_on(raw, exported, tmp_path):
    preparation = load_preparation(exported)
    assert preparation.labels == ("a", "b") and "who" not in preparation.schema.names
    found = preparation.prepare_values(raw)[""]
    assert len(found) == 90 and found.dtype == np.float32
    known = {row.tobytes() for row in found}
    for name in ("validation", "test"):
        split = prepare_rows(config_of(tmp_path)).splits[name].inputs[""]
        assert len(split) and {row.tobytes() for row in split} <= known, name
    one = preparation.prepare_values(raw[:1])[""]
    assert one.tobytes() == found[:1].tobytes()


BY_TIME = {"inputs": [], "prepare": STEPS[:2], "cut": {"by": "time", "key": "when", "backwards": "sort"}}


@pytest.mark.parametrize(
    "more", [BY_TIME, {"inputs": {"a": ["x", "word"], "b": ["when_hour"]}, "prepare": STEPS[:3]}], ids=["all", "named"]
)
def test_inputs_without_a_list_and_with_names_are_those_of_the_run(raw, tmp_path, more):
    config = config_of(tmp_path, **more)
    keep_fitted(config, tmp_path)
    if more is BY_TIME:
        raw = [{name: row[name] for name in ("x", "y", "word")} | {"who": at // 3} for at, row in enumerate(raw)]
    found = load_preparation(tmp_path / "data").prepare_values(raw)
    split = prepare_rows(config).splits["test"].inputs
    assert set(found) == set(split)
    for name, array in split.items():
        assert {row.tobytes() for row in array} <= {row.tobytes() for row in found[name]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"x": 1.0, "wrod": "w1"}, "row 2: there is no column 'wrod'"),
        ({"x": "much"}, "row 2, column 'x': 'much' is no f8"),
        ({"x": 1.0, "y": 2.0, "when": "yesterday"}, "row 2, column 'when'"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_named(raw, exported, row, words):
    with pytest.raises(RequestError, match=words.replace("(", "\\(")):
        load_preparation(exported).prepare_values([raw[0], row])
    with pytest.raises(RequestError, match="there is no row"):
        load_preparation(exported).prepare_values([])


def test_an_altered_folder_is_refused(exported):
    path = exported / "columns.json"
    whole = json.loads(path.read_text())
    whole["columns"]["inputs"][""].reverse()
    path.write_text(json.dumps(whole))
    with pytest.raises(RequestError, match="torn or altered"):
        load_preparation(exported)
    path.unlink()
    with pytest.raises(RequestError, match="export the run again"):
        load_preparation(exported)


def test_a_run_of_other_data_exports_no_preparation(tmp_path):
    (tmp_path / "out").mkdir()
    assert export_preparation(tmp_path / "data", tmp_path / "out") is None
    assert not list((tmp_path / "out").iterdir())
