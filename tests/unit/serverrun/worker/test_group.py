"""The ranks of a worker that is a group: what they compute together, where they meet, and who is named when one does not come."""

from dataclasses import replace

import pytest

from shoal.comm.wire.node import new_instance_id
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.paramserver.config import group_plan
from shoal.serverrun.worker.group import join_group
from support.paramserver.run_in_process import place_in, recipe_of

PLAN = Plan.parse("ps=2 workers=2 tp=2 pp=2 microbatches=4 recompute=full update=ssp:1 backup=1")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "s").mkdir()
    return place_in(tmp_path, "worker", 1, PLAN, recipe_of("elastic.start_deadline=0.3"))


def test_a_group_computes_by_the_plan_without_its_servers():
    assert str(group_plan(PLAN)) == "dp=1 tp=2 pp=2 microbatches=4 recompute=full"
    assert group_plan(PLAN).world_size == 4


def test_a_rank_has_its_workers_number_and_its_group_a_place_of_its_own(place):
    other = replace(place, name="worker-1.3", group_rank=3)
    assert other.index == place.index == 1
    assert other.group_store == place.group_store
    again = replace(other, instance_id=new_instance_id())
    assert again.group_store != place.group_store, "a group that is started again would meet the one before"
    assert replace(place, name="worker-0").group_store != place.group_store


def test_a_rank_that_does_not_come_is_named(place):
    with pytest.raises(RunError, match=r"rank 0 and 1 and 3 of the 4 ranks of worker-1 did not come within 0.3 s"):
        join_group(replace(place, name="worker-1.2", group_rank=2))


def test_a_worker_of_one_process_meets_nobody(place):
    world = join_group(replace(place, plan=Plan.parse("ps=2 workers=2")))
    assert (world.rank, world.size, world.group) == (0, 1, None)
    assert not place.group_store.exists()
