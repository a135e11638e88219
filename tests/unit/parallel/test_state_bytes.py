"""Predicted bytes against the storages of a rank that really took a step; nothing needs to cross for that."""

import pytest
import torch
from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.plan import Plan
from shoal.optim.build import build_optimizer, initialise_state
from shoal.optim.config import OptimConfig
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.state_bytes import measure_state_bytes, predict_state_bytes
from shoal.parallel.zero.apply import apply_zero

ANALYSIS = ModuleAnalysis(stacks=(Stack(blocks=("2", "3", "4")),))


def build(device="cpu"):
    """StateBytes that 16 does not divide, an embedding, blocks and a layer of its own."""
    blocks = [nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.LayerNorm(9)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(21, 9), nn.LayerNorm(9), *blocks, nn.Linear(9, 5)).to(device)


class Plain:
    """What a step without sharding reports."""

    def __init__(self, model):
        self.updated, self.exchange = dict(sorted(model.named_parameters())), None


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "adagrad", "lars", "lamb"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "rank"), [(2, 0), (2, 1), (3, 2), (16, 15)])
def test_bytes_are_as_predicted(optimizer, stage, dp, rank):
    how = {"num_data_ranks": dp, "data_rank": rank, "num_microbatches": 1, "optim": OptimConfig(name=optimizer)}
    predicted = predict_state_bytes(build("meta"), analysis=ANALYSIS, stage=stage, **how)
    model, mesh = build(), pretend_mesh(Plan(dp=dp), rank)
    how = {"analysis": ANALYSIS, "mesh": mesh, "num_microbatches": 1, "placements": {}}
    reduction = apply_zero(model, stage=stage, **how) if stage else Plain(model)
    built = build_optimizer(OptimConfig(name=optimizer), model, reduction.updated if stage else None)
    initialise_state(built)
    if stage:
        reduction.begin_step()
        with reduction.microbatch(is_last=True):
            model(torch.arange(6)).sum().backward()
        reduction.finish()
    else:
        model(torch.arange(6)).sum().backward()
    built.step()
    assert measure_state_bytes(model, reduction, built) == predicted


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_several_microbatches_keep_whole_gradients(stage):
    how = {"analysis": ANALYSIS, "stage": stage, "num_data_ranks": 2, "data_rank": 0, "optim": OptimConfig()}
    one, two = (predict_state_bytes(build("meta"), num_microbatches=number, **how) for number in (1, 2))
    assert (one.gradients < two.gradients) == (stage > 1)
    assert (one.weights, one.optimizer) == (two.weights, two.optimizer)
