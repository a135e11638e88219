"""From recordings to a judgement: the first thing that is wrong, in words, whatever came after it."""

import pytest
import torch

from shoal.core.placement import place_whole
from shoal.core.plan import Plan
from shoal.optim.config import OptimConfig
from shoal.verify.compare.assemble import assemble_step
from shoal.verify.compare.diagnose import RankGrid
from shoal.verify.compare.judge import judge_run
from shoal.verify.compare.tolerance import derive_tolerance
from shoal.verify.reference.recording import Recorder, Recording, placement_values

LAYOUT = RankGrid(
    degrees={"pp": 1, "dp": 2, "cp": 1, "tp": 1, "microbatches": 1},
    coordinates=[{"pp": 0, "dp": rank, "cp": 0, "tp": 0} for rank in range(2)],
)
STEPS = 3


def tensors_of(step):
    generator = torch.Generator().manual_seed(step)
    names = ("grad/a", "grad/norm", "optimizer/a/m", "weight/a", "buffer/b")
    return {name: torch.randn(6, 4, generator=generator) for name in names}


@pytest.fixture
def judge(tmp_path):
    """Judge two ranks that hold everything whole; ``change(rank, step, values)`` is the bug."""

    def run(change=lambda rank, step, values: None, flat=1e-7):
        for rank in (None, 0, 1):
            prefix = "reference" if rank is None else f"rank-{rank:03d}"
            recorder = Recorder(tmp_path, prefix)
            for step in range(STEPS):
                values = {"loss": 3.0, "norm": 2.0, **tensors_of(step)}
                if rank is not None:
                    change(rank, step, values)
                recorder.add(loss=values.pop("loss"), norm=values.pop("norm"), skipped=False, tensors=values)
            recorder.close(
                flat=flat,
                placements={name: placement_values(place_whole((6, 4))) for name in ("a", "norm")},
            )
        tolerance = derive_tolerance(
            Plan.parse("dp=2"),
            precision="float32",
            depth=2,
            adds_in_order=True,
            joins_replicas=False,
            optim=OptimConfig(),
            total_steps=10,
            steps=STEPS,
        )
        ranks = [Recording.open(tmp_path, f"rank-{rank:03d}") for rank in range(2)]
        return judge_run(
            Recording.open(tmp_path, "reference"),
            lambda index: assemble_step(ranks, index),
            tolerance=tolerance,
            layout=LAYOUT,
            flat_bound=1e-5,
            explain_flat=lambda: "the loss is not the mean over its items",
        )

    return run


def test_equal_runs_have_no_difference(judge):
    judged = judge()
    assert judged.difference is None and judged.comparison.is_bitwise
    assert judged.comparison.num_compared["grad"] == 2 * STEPS


def test_a_scaled_gradient_at_the_second_step(judge):
    def change(rank, step, values):
        if step == 1:
            values["grad/a"] = values["grad/a"] * 2
            values["weight/a"] = values["weight/a"] + 1

    difference = judge(change).difference
    assert (difference.kind, difference.step, difference.tensor) == ("grad", 2, "a")
    assert "a factor of 2, the size of dp" in difference.pattern and difference.spread == "this tensor only"
    assert "step 2, grad of a: off by 1, allowed 0" in str(difference)


def test_a_replica_that_drifts_is_seen_although_the_first_is_right(judge):
    def change(rank, step, values):
        if rank == 1 and step == 2:
            values["buffer/b"] = values["buffer/b"] + 1

    difference = judge(change).difference
    assert (difference.kind, difference.step) == ("buffer", 3)
    assert "one replica only: dp coordinate 1 (rank 1)" in difference.pattern


def test_ranks_that_disagree_about_the_norm(judge):
    def change(rank, step, values):
        values["norm"] = 2.0 if rank == 0 else 1.0

    difference = judge(change).difference
    assert difference.kind == "norm" and "different values" in difference.pattern


def test_a_stale_value_is_called_so(judge):
    def change(rank, step, values):
        if step == 2:
            values["optimizer/a/m"] = tensors_of(1)["optimizer/a/m"]

    difference = judge(change).difference
    assert difference.kind == "optimizer" and difference.pattern == "it is the value of the step before"


def test_the_norm_of_one_shard(judge):
    def change(rank, step, values):
        grads = [tensors_of(step)[name].double().norm() for name in ("grad/a", "grad/norm")]
        values["norm"] = float(torch.stack(grads).norm())

    assert "what rank 0 holds alone" in judge(change).difference.pattern


def test_a_tensor_that_the_plan_lost(judge):
    difference = judge(lambda rank, step, values: values.pop("weight/a")).difference
    assert difference.kind == "weight" and "the plan has no such tensor" in difference.pattern


def test_a_tree_far_from_the_flat_sum(judge):
    found = judge(flat=1e-2).difference
    assert found.kind == "flat" and "the loss is not the mean over its items" in str(found)
    assert judge(flat=None).difference is None
