"""``source = "table"`` under ``shoal train``: fitted once, kept with the run, and applied by whoever goes on with it."""

import json
import shutil

import pytest

from support.processes.command import ROOT, read_summary


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
