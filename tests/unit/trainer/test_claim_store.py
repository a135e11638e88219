"""A run reads one version of its store: the newest when it began."""

from dataclasses import replace

import numpy as np
import psutil
import pytest

from shoal.core.errors import RequestError
from shoal.core.rundir import RunDir
from shoal.data.store.writer import append_store, build_store
from shoal.data.table import Table, number_column
from shoal.trainer.claim import list_differences, pin_data
from shoal.trainer.config import dump_recipe, read_recipe
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare


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


def test_memory_for_every_rank_of_the_host_is_counted_before_anything_starts(tmp_path):
    build_store(tokens(1000), str(tmp_path / "store"))
    share = psutil.virtual_memory().total * 2 // 3 >> 20
    recipe = recipe_for(tmp_path / "store", cache={"memory": f"{share} MiB"})
    (tmp_path / "a.toml").write_text(dump_recipe(recipe))
    request = TrainRequest(recipe=tmp_path / "a.toml", run_dir=tmp_path / "run")
    assert prepare(request, own=OwnPartsHere()).setup.world_size == 1
    two = replace(request, plan="dp=2")
    with pytest.raises(RequestError, match=r"MiB for each of 2 ranks is .* and this machine has"):
        prepare(two, own=OwnPartsHere())
    # Of ranks on two hosts one is here.
    assert prepare(replace(two, ranks_here=1), own=OwnPartsHere()).setup.world_size == 2
