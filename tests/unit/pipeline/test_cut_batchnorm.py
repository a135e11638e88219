"""Batch norms in stages: the running statistics of one process, on the rank that has the layer and nowhere else."""

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.batchnorm import ReplicaBatchNorm, apply_batchnorm, begin_microbatch, fold
from shoal.parallel.recompute import apply_recompute
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units
from shoal.randomness.dropout import apply_keyed_dropout

D = 4
BLOCKS = tuple(f"blocks.{index}" for index in range(3))
NUM_MICROBATCHES = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make():
    torch.manual_seed(0)
    model = Net()
    apply_batchnorm(model, group=None, mode="local")
    return model


def batch(microbatch):
    # The last one has a shape that no stand-in has been asked for.
    return torch.randn(6 - microbatch // 2, D, generator=torch.Generator().manual_seed(microbatch))


def statistics(model):
    return dict(model.named_buffers())


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("is_one_rank", [False, True])
def test_running_statistics_are_those_of_one_process(is_one_rank, recompute):
    whole = make()
    for microbatch in range(NUM_MICROBATCHES):
        begin_microbatch(whole, microbatch)
        whole(batch(microbatch))
    fold(whole)
    parts = [make() for _ in range(2)]
    chains = []
    for number, model in enumerate(parts):
        analysis = ModuleAnalysis(stacks=(Stack(blocks=BLOCKS),))
        units = find_units(model, (batch(0),), analysis)
        if recompute is not None:
            apply_recompute(model, analysis=analysis, mode=recompute, dropout=apply_keyed_dropout(model, 1))
        chain = StagedModule(model, units, [0, 2])
        chain.settle((batch(0),))
        # Both stages on one rank, one of which stands in for the other in turn; or one on each.
        chain.keep({0, 1} if is_one_rank else {number})
        chains.append(chain)
    ends = {}
    for action in ("F0", "F1", "B0", "F2", "B1", "B2"):
        microbatch = int(action[1])
        for model in parts:
            begin_microbatch(model, microbatch)
        home = [0, 0] if is_one_rank else [0, 1]
        if action[0] == "F":
            (middle,) = chains[home[0]].run(0, (batch(microbatch),))
            received = middle.detach().requires_grad_()
            ends[microbatch] = (middle, received, chains[home[1]].run(1, (batch(microbatch),), (received,)))
        else:
            middle, received, output = ends.pop(microbatch)
            output.sum().backward()
            middle.backward(received.grad)
    expected = statistics(whole)
    for number, model in enumerate(parts[: 1 if is_one_rank else 2]):
        fold(model)
        own = statistics(model)
        held = {0, 1} if is_one_rank else {number}
        blocks = [path for path, stage in zip(BLOCKS, (0, 0, 1), strict=True) if stage in held]
        assert {name.rpartition(".norm")[0] for name in own} == set(blocks)
        assert len([m for m in model.modules() if isinstance(m, ReplicaBatchNorm)]) == len(blocks)
        for name, value in own.items():
            assert torch.equal(value, expected[name]), name
