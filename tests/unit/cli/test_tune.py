"""What ``shoal tune`` keeps: the fastest plan in a recipe, with everything else of it as it was."""

import os
from pathlib import Path

import pytest

from shoal.cli.tune import keep_plan, train_command
from shoal.core.errors import RunError
from shoal.trainer.config import load_recipe, with_plan
from support.processes.command import TINY

PLAN = "dp=1 pp=2 schedule=1f1b microbatches=4"
COMMENTED = """\
# My run.
plan = "auto"    # to be tuned

# What is trained.
[model]
name = "gpt"     # small
"""


def test_only_the_plan_changes_in_the_text():
    assert with_plan(COMMENTED, PLAN) == COMMENTED.replace('"auto"', f'"{PLAN}"')
    crossed = COMMENTED.replace("\n", "\r\n")
    assert with_plan(crossed, PLAN) == crossed.replace('"auto"', f'"{PLAN}"')


@pytest.mark.parametrize("text", ["# About the model.\n[model]\nname = 'gpt'\n", "model.name = 'gpt'\n", ""])
def test_a_recipe_without_a_plan_gets_one_at_its_top(text):
    """Before the first section it would come between that and the comment about it, and below one it would be that one's key."""
    assert with_plan(text, PLAN) == f'plan = "{PLAN}"\n{text}'


def test_the_recipe_itself_or_another_file_may_keep_it(tmp_path):
    recipe, other = tmp_path / "run.toml", tmp_path / "tuned.toml"
    recipe.write_text(TINY)
    recipe.chmod(0o640)
    keep_plan(recipe, PLAN, other)
    assert load_recipe(other).plan == PLAN and recipe.read_text() == TINY
    keep_plan(recipe, PLAN, recipe)
    assert recipe.read_text() == other.read_text() == TINY.replace('plan = "dp=1"', f'plan = "{PLAN}"')
    assert recipe.stat().st_mode & 0o777 == 0o640 and sorted(os.listdir(tmp_path)) == ["run.toml", "tuned.toml"]


def test_a_recipe_that_is_gone_or_broken_by_now_leaves_the_other_file_alone(tmp_path):
    recipe, other = tmp_path / "run.toml", tmp_path / "tuned.toml"
    other.write_text("mine")
    for break_it in (lambda: None, lambda: recipe.write_text("plan = ")):
        break_it()
        with pytest.raises(
            RunError, match=f"can no longer be read, so .*tuned.toml is not written: .*; set plan = '{PLAN}'"
        ):
            keep_plan(recipe, PLAN, other)
    assert other.read_text() == "mine"


def test_the_command_has_what_the_trials_had():
    """It left out what --set had changed, and named a recipe with a space in two words."""
    changes = ("train.global_batch=32", "train.precision=bfloat16")
    told = train_command(Path("my run.toml"), PLAN, changes, written=None)
    assert told == (
        f"shoal train 'my run.toml' --plan '{PLAN}' --set train.global_batch=32 --set train.precision=bfloat16"
    )
    assert train_command(Path("run.toml"), PLAN, (), written=Path("tuned.toml")) == "shoal train tuned.toml"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.toml", "mine.toml: there is such a file, and it is not the recipe run.toml; name another, or give --overwrite"),
        ("absent/tuned.toml", "--write absent/tuned.toml: there is no folder absent; make it first"),
        (".", "--write . is a folder; name a file"),
        ("-", "--write - would mix the recipe with the table; name a file"),
    ],
)  # fmt: skip
def test_a_file_that_may_not_be_written_is_refused_before_anything_is_tried(shoal, tmp_path, target, message):
    (tmp_path / "run.toml").write_text(TINY)
    (tmp_path / "mine.toml").write_text("mine")
    done = shoal("tune", "run.toml", "--write", target, "--machine", "absent.json")
    assert done.returncode == 2 and message in done.stderr and "absent.json" not in done.stderr and done.stdout == ""
    assert (tmp_path / "mine.toml").read_text() == "mine"


@pytest.mark.parametrize("arguments", [("run.toml",), ("./run.toml",), ("mine.toml", "--overwrite"), ("new.toml",)])
def test_a_file_that_may_be_written_is_no_obstacle(shoal, tmp_path, arguments):
    """What stops these is the machine file, which is asked for next."""
    (tmp_path / "run.toml").write_text(TINY)
    (tmp_path / "mine.toml").write_text("mine")
    done = shoal("tune", "run.toml", "--machine", "absent.json", "--write", *arguments)
    assert done.returncode == 2 and "absent.json" in done.stderr and (tmp_path / "mine.toml").read_text() == "mine"
