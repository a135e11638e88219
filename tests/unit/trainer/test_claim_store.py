"""A run reads one version of its store: the newest when it began."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.core.rundir import RunDir
from shoal.data.store.writer import append_store, build_store
from shoal.data.table import Table, number_column
from shoal.trainer.claim import list_differences, pin_data
from shoal.trainer.config import dump_recipe, read_recipe


def tokens(count):
    return [Table.of([number_column("tokens", np.arange(count) % 50)])]


def recipe_for(store, **data):
    return read_recipe(
        {
            "model": {"name": "gpt", "layers": 1, "hidden": 8, "heads": 1},
            "data": {"source": "store", "path": str(store), "sequence": 8, **data},
            "train": {"steps": 2, "global_batch": 4},
        }
    )


def test_a_run_that_goes_on_reads_the_version_that_it_began_with(tmp_path):
    store, run = tmp_path / "store", RunDir(tmp_path / "run")
    build_store(tokens(1000), str(store))
    first = pin_data(recipe_for(store), None)
    assert first.data.version == 1
    run.root.mkdir()
    run.recipe.write_text(dump_recipe(first))
    append_store(tokens(500), str(store))
    again = pin_data(recipe_for(store), run)
    assert again.data.version == 1 and list_differences(run, again) == []
    # A run that begins now, and one that is told which, read another.
    assert pin_data(recipe_for(store), None).data.version == 2
    told = pin_data(recipe_for(store, version=2), run)
    assert told.data.version == 2 and list_differences(run, told) == ["data.version is 1 there and 2 here"]
    # How rows are loaded may change.
    assert list_differences(run, pin_data(recipe_for(store, load="whole"), run)) == []


def test_other_data_that_is_accepted_is_the_newest(tmp_path):
    store, run = tmp_path / "store", RunDir(tmp_path / "run")
    build_store(tokens(1000), str(store))
    run.root.mkdir()
    run.recipe.write_text(dump_recipe(pin_data(recipe_for(store), None)))
    append_store(tokens(500), str(store))
    accepted = recipe_for(store)
    accepted = accepted.model_copy(update={"checkpoint": accepted.checkpoint.model_copy(update={"other_data": True})})
    assert pin_data(accepted, run).data.version == 2


def test_no_store_is_told_before_anything_starts(tmp_path):
    with pytest.raises(RequestError, match="no store of data"):
        pin_data(recipe_for(tmp_path / "none"), None)
