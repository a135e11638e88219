"""One rank without peers: a rehearsal's traffic is counted, what comes out is finite, and nothing of it is left."""

import sys

import pytest
import torch
import torch.distributed as dist

from shoal.comm.rehearsal import rehearsed_world
from shoal.comm.trafficcounter import traffic_rows
from shoal.core.config import validate
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.trainer.config import Recipe
from shoal.tuning.rehearsal import build_subject, trace_rank
from support.training.rehearsals import rehearse_rank, rehearse_ranks

RECIPE = {
    "plan": "dp=1",
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 33},
    "train": {"steps": 10, "global_batch": 8},
}


@pytest.fixture(scope="module")
def subject():
    return build_subject(validate(Recipe, RECIPE, origin="test"))


def test_a_single_rank_moves_nothing(subject):
    (only,) = rehearse_ranks(subject, Plan.parse("dp=1"))
    assert only.traffic == {}
    weights = sum(parameter.nbytes for parameter in subject.model.parameters())
    # AdamW: two moments of every weight, and a count of steps for every tensor.
    assert only.state["weights"] == only.state["gradients"] == weights
    assert only.state["optimizer"] == 2 * weights + 4 * len(list(subject.model.parameters()))


def test_replicas_sum_their_gradients_with_the_loss_aboard(subject):
    weights = sum(parameter.nbytes for parameter in subject.model.parameters())
    assert traffic_rows(rehearse_rank(subject, Plan.parse("dp=2"), 1).traffic) == {
        "replicas all_reduce": [1, weights + 8]
    }


def test_the_model_and_the_process_are_left_as_they_were(subject):
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    hook = sys.excepthook
    rehearse_ranks(subject, Plan.parse("dp=1 pp=2"))
    assert all(torch.equal(before[name], tensor) for name, tensor in subject.model.state_dict().items())
    assert not dist.is_initialized() and sys.excepthook is hook


def test_cells_of_a_pipeline_are_timed(subject):
    plan = Plan.parse("dp=1 pp=2 microbatches=4 schedule=1f1b")
    with rehearsed_world(1, 2) as world:
        trace = trace_rank(subject, plan, world=world, num_steps=2)
    assert len(trace.steps) == 2
    assert len(trace.steps[-1].cells) == 2 * 4
    assert 0 < trace.steps[-1].cell_seconds < trace.steps[-1].seconds


@pytest.mark.parametrize("plan", ["dp=1 pp=2 schedule=pipedream", "ps=1 workers=1"])
def test_what_is_not_synchronous_is_refused(subject, plan):
    with rehearsed_world(0, 2) as world, pytest.raises(RequestError, match="not synchronous"):
        trace_rank(subject, Plan.parse(plan), world=world)


def test_a_process_that_is_in_a_group_cannot_rehearse(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(RunError, match="joined no group"), rehearsed_world(0, 2):
            pass
    finally:
        dist.destroy_process_group()
