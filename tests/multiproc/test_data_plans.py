"""Rows of tables and of stores under other plans than data parallel ones: each equals one process."""

import json
import shutil

import pytest

from support.processes.command import ROOT, read_summary

PLANS = ("dp=2 zero=3", "tp=2", "pp=2", "ps=1 workers=2")
STORE = """
plan = "dp=1"
[model]
name = "mlp"
hidden = 16
[data]
source = "store"
path = "rows"
target = "label"
[train]
steps = 12
global_batch = 32
seed = 1
[optim]
name = "adamw"
lr = 1e-2
"""


@pytest.fixture
def recipes(shoal):
    """The shipped recipe of a table, and one of a store of rows."""
    shutil.copy(ROOT / "recipes" / "data" / "pumps.csv", shoal.folder / "pumps.csv")
    text = (ROOT / "recipes" / "table.toml").read_text().replace("recipes/data/pumps.csv", "pumps.csv")
    (shoal.folder / "table.toml").write_text(text.replace("steps = 60", "steps = 12"))
    lines = [f"{row % 17 / 17},{row % 23 / 23},{row % 3}" for row in range(300)]
    (shoal.folder / "rows.csv").write_text("\n".join(["a,b,label", *lines]) + "\n")
    shoal.run("data", "build", "rows.csv", "rows")
    (shoal.folder / "store.toml").write_text(STORE)
    return ("table.toml", "store.toml")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_tables_and_stores_are_proved_under_every_kind_of_plan(shoal, recipes):
    for recipe in recipes:
        words = [word for plan in PLANS for word in ("--plan", plan)]
        shoal.run("verify", recipe, *words, "--json", "v.json", timeout=400)
        found = json.loads((shoal.folder / "v.json").read_text())
        assert len(found["plans"]) >= len(PLANS), found.keys()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_tables_and_stores_train_with_asynchronous_parameter_servers(shoal, recipes):
    for recipe in recipes:
        plan = "ps=2 workers=2 update=async backup=1"
        shoal.run("train", recipe, "--plan", plan, "--run-dir", f"run-{recipe}", timeout=250)
        assert read_summary(shoal.folder / f"run-{recipe}")["steps"] == 12
