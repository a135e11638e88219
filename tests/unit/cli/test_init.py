"""``shoal init``: what it writes is read by the same code that reads any recipe, trains, and is never overwritten."""

import json
import os
import sys

import pytest

from shoal.cli.init import RECIPE, SCRIPT, write_starter
from shoal.core.errors import RequestError
from shoal.core.functions import load_function
from shoal.trainer.config import load_recipe


def test_the_recipe_is_a_recipe(tmp_path):
    recipe_path, _ = write_starter(tmp_path / "new" / "project")
    recipe = load_recipe(recipe_path)
    assert (recipe.plan, recipe.model.build, recipe.data.build) == ("dp=2", "starter:build", "starter:dataset")
    assert (recipe.train.steps, recipe.train.global_batch, recipe.checkpoint.every) == (300, 64, 100)


def test_the_script_is_short_and_knows_nothing_of_us():
    assert len(SCRIPT.splitlines()) < 40
    assert "import shoal" not in SCRIPT and "from shoal" not in SCRIPT


def test_the_functions_that_the_recipe_names_do_what_it_says(tmp_path, monkeypatch):
    recipe = load_recipe(write_starter(tmp_path)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "starter", raising=False)
    dataset = load_function(recipe.data.build)(**recipe.data.args)
    model = load_function(recipe.model.build)(**recipe.model.args)
    monkeypatch.delitem(sys.modules, "starter")
    point, arm = dataset[0]
    assert len(dataset) == 4096 and tuple(point.shape) == (2,) and int(arm) in (0, 1)
    assert tuple(model(point[None]).shape) == (1, 2)


def test_what_was_written_trains_as_it_is(shoal, tmp_path):
    shoal("init", ".")
    done = shoal("train", "recipe.toml", "--run-dir", "run", "--json", "out.json", timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["status"], result["steps"], result["world_size"]) == ("completed", 300, 2)
    # Two spirals that the model tells apart: a coin would have ln 2 = 0.69.
    assert result["validation_loss"] < 0.2


@pytest.mark.parametrize("name", ["recipe.toml", "starter.py"])
def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(RequestError, match=f"{name} already there"):
        write_starter(tmp_path)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"


def test_a_link_to_nowhere_is_not_written_through(tmp_path):
    (tmp_path / "recipe.toml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError):
        write_starter(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_the_verb_says_what_to_do_next(shoal, tmp_path):
    done = shoal("init", "project", "--json", "out.json")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "now: cd project && shoal train recipe.toml"
    assert json.loads((tmp_path / "out.json").read_text())["files"] == ["project/recipe.toml", "project/starter.py"]
    assert (tmp_path / "project" / "recipe.toml").read_text() == RECIPE
    again = shoal("init", "project")
    assert again.returncode == 2 and again.stderr.startswith("error: ")


def test_a_file_in_the_place_of_the_folder_is_refused(shoal, tmp_path):
    (tmp_path / "file").write_text("")
    done = shoal("init", "file")
    assert done.returncode == 2 and "file" in done.stderr
