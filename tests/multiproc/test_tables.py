"""``source = "table"`` under ``shoal train``: fitted once, kept with the run, and applied by whoever goes on with it."""

import csv
import json
import shutil
import tomllib

import pytest

from shoal.core.config import validate
from shoal.data.config import TableConfig
from shoal.data.partition.cut import cut_table
from shoal.data.prepare import open_rows, prepare_rows
from shoal.data.table import concat_tables
from support.processes.command import ROOT, read_summary
from support.processes.serving import ask, wait_for_address


@pytest.fixture
def recipe(shoal):
    """The shipped recipe, beside a copy of its table."""
    shutil.copy(ROOT / "recipes" / "data" / "pumps.csv", shoal.folder / "pumps.csv")
    text = (ROOT / "recipes" / "table.toml").read_text().replace("recipes/data/pumps.csv", "pumps.csv")
    path = shoal.folder / "table.toml"
    path.write_text(text.replace("steps = 60", "steps = 40"))
    return path


def sha(shoal, run):
    return read_summary(shoal.folder / run)["weights_sha256"]


def test_a_resume_in_the_middle_ends_in_the_same_weights(shoal, recipe):
    shoal.run("train", recipe, "--run-dir", "whole")
    shoal.run("train", recipe, "--run-dir", "parts", "--set", "train.steps=20")
    fitted = (shoal.folder / "parts" / "data" / "fitted.json").read_text()
    shoal.run("train", recipe, "--run-dir", "parts", "--resume")
    assert sha(shoal, "parts") == sha(shoal, "whole")
    assert (shoal.folder / "parts" / "data" / "fitted.json").read_text() == fitted
    # A run that was moved takes what was fitted along, and an evaluation fits nothing.
    shutil.move(shoal.folder / "whole", shoal.folder / "moved")
    said = json.loads(fitted)["digest"]
    assert said in (shoal.folder / "moved" / "recipe.toml").read_text()
    shoal.run("eval", "moved", "--split", "validation", "--json", "e.json")
    summary = read_summary(shoal.folder / "moved")
    assert json.loads((shoal.folder / "e.json").read_text())["loss"] == pytest.approx(
        summary["validation_loss"], rel=1e-6
    )


def test_a_store_of_the_rows_ends_in_the_weights_of_the_table(shoal, recipe):
    """Over a resume with a version appended in between; what was fitted is in the run, for evaluations and servers."""
    shoal.run("train", recipe, "--run-dir", "table")
    shoal.run("data", "build", "pumps.csv", "pumps", "--type", "when=time", "--block-bytes", 16384)
    shares = ("--validation", 0.15, "--test", 0.15)
    shoal.run("data", "split", "pumps", "--by", "user", "--key", "user", *shares, "--save", "users")
    text = recipe.read_text().replace(
        'source = "table"\npath = "pumps.csv"', 'source = "store"\npath = "pumps"\nsplit = "users"'
    )
    text = text.replace('[data.cut]\nby = "user"\nkey = "user"\n', "").replace('types = { when = "time" }\n', "")
    path = shoal.folder / "store.toml"
    path.write_text(text)
    shoal.run("train", path, "--run-dir", "store", "--set", "train.steps=20")
    shoal.run("data", "build", "pumps.csv", "pumps", "--append", "--type", "when=time")
    shoal.run("train", path, "--run-dir", "store", "--resume")
    assert sha(shoal, "store") == sha(shoal, "table")
    for name in ("fitted.json", "fitted.safetensors", "columns.json"):
        ours, theirs = ((shoal.folder / run / "data" / name).read_bytes() for run in ("store", "table"))
        assert ours == theirs, name
    shoal.run("eval", "store", "--split", "test", "--json", "e.json")
    assert 0 < json.loads((shoal.folder / "e.json").read_text())["loss"] < 10


def test_rows_that_changed_and_a_state_that_was_altered_are_refused(shoal, recipe):
    shoal.run("train", recipe, "--run-dir", "run", "--set", "train.steps=5")
    table = shoal.folder / "pumps.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:-40]) + "\n")
    refused = shoal.run("train", recipe, "--run-dir", "run", "--resume", expect=2)
    assert "have seen other rows than those of the training split now" in refused.stderr
    table.write_text("\n".join(lines) + "\n")
    path = shoal.folder / "run" / "data" / "fitted.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert "torn or altered" in shoal.run("eval", "run", expect=2).stderr


def test_raw_rows_are_answered_as_those_of_training_were_prepared(shoal, recipe):
    publish = ["--set", "publish.every_steps=20", "--set", "checkpoint.every=20"]
    shoal.run("train", recipe, "--plan", "dp=2", "--run-dir", "run", *publish)
    own = {"fitted": str(shoal.folder / "run" / "data"), "path": str(shoal.folder / "pumps.csv")}
    config = tomllib.loads(recipe.read_text())["data"] | own
    prepared = prepare_rows(validate(TableConfig, config, origin="test"))
    held_out = prepared.splits["validation"]
    with (shoal.folder / "pumps.csv").open() as file:
        lines = list(csv.DictReader(file))
    column = validate(TableConfig, config, origin="test").cut
    # The rows of the file that are held out, as whoever asks has them.
    table = concat_tables(list(open_rows(validate(TableConfig, config, origin="test")).tables()))
    cut = cut_table(table, column, validation=config["validation"], test=config["test"], where="pumps.csv")
    chosen = [lines[row] for row in cut.rows["validation"][:40]]
    numbers = ("temperature", "pressure", "flow")
    raw = [
        {name: row[name] for name in ("kind", "when")} | {name: float(row[name]) for name in numbers if row[name]}
        for row in chosen
    ]
    assert any(len(row) < 5 for row in raw), "some values are missing, and a step fills them"
    process = shoal.start("serve", "run", "--port", 0)
    address = wait_for_address(process)
    model = ask(address, "GET", "/model")[1]
    assert model["version"] == 2 and set(model["columns"]) == {*numbers, "kind", "when"}
    (field,) = model["inputs"]
    status, said = ask(address, "POST", "/predict", {"rows": raw})
    inputs = held_out.inputs[""][:40].tolist()
    assert status == 200 and len(inputs) == 40
    _, expected = ask(address, "POST", "/predict", {"inputs": {field["name"]: inputs}})
    assert said["outputs"] == expected["outputs"], "the same bits as of rows that training prepared"
    best = [max(range(len(scores)), key=scores.__getitem__) for scores in said["outputs"]]
    assert said["labels"] == [prepared.space.names[place] for place in best]
    for row, words in [
        ({"colour": 1}, "there is no column 'colour'"),
        ({"flow": "much"}, "row 1, column 'flow'"),
        ({"flow": 10**400}, "outside float64"),
        ({"flow": 1.0}, "missing values in the rows that are asked for"),
        (7, "rows[0] is a number"),
    ]:
        status, said = ask(address, "POST", "/predict", {"rows": [row]})
        assert status == 400 and words in said["error"]
    # A run without a published version has the steps in its own folder.
    shutil.rmtree(shoal.folder / "run" / "published")
    address = wait_for_address(shoal.start("serve", "run", "--port", 0))
    assert ask(address, "POST", "/predict", {"rows": raw})[1]["outputs"] == expected["outputs"]
