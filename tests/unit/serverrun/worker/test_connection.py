"""A worker's line to the others: how long it waits to be let in."""

import pytest
from torch import nn

from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.paramserver.sharding import cut_model
from shoal.paramserver.worker.flat import FlatModel, describe_model
from shoal.serverrun.worker.connection import ServerConnection, Worker
from support.paramserver.run_in_process import place_in, recipe_of


def test_a_worker_waits_for_a_center_as_long_as_the_recipe_says(tmp_path):
    """It gave up after two minutes, whatever ``elastic.start_deadline`` said."""
    tmp_path.chmod(0o700)
    model = nn.Linear(3, 2)
    flat = FlatModel(model, cut_model(describe_model(model), 1))
    recipe = recipe_of("elastic.start_deadline=0.3")
    place = place_in(tmp_path, "worker", 0, Plan.parse("ps=1 workers=1"), recipe)
    with pytest.raises(RunError, match=r"no center let worker-0 in within 0.3 s; .* elastic.start_deadline"):
        ServerConnection(place, Worker(flat=flat, shares=None, total_steps=1))
