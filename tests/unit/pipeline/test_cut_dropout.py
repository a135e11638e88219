"""Dropout in stages: the bits that one process draws, wherever its dropouts stand and whoever shares them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.recompute import apply_recompute
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units
from shoal.randomness.dropout import apply_keyed_dropout

D, N = 8, 6


class Inner(nn.Module):
    """Drops by a function; one of it is in every block."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)), 0.3, self.training)


class Block(nn.Module):
    def __init__(self, dropout: nn.Module | None, inner: nn.Module | None):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.dropout, self.inner = dropout, inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        x = x if self.inner is None else x + self.inner(x)
        return x if self.dropout is None else self.dropout(x)


class Net(nn.Module):
    """Every way to drop in two places by one key: a dropout in all blocks, a function in a shared module, and in the model."""

    def __init__(self, *, module: bool, function: bool, between: bool):
        super().__init__()
        self.first = nn.Linear(D, D)
        dropout, inner = nn.Dropout(0.3) if module else None, Inner() if function else None
        self.blocks = nn.ModuleList(Block(dropout, inner) for _ in range(4))
        self.last = nn.Linear(D, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if self.between:
                x = F.dropout(x, 0.3, self.training)
        return self.last(x)


BLOCKS = tuple(f"blocks.{index}" for index in range(4))
KINDS = {
    "a shared module": {"module": True, "function": False, "between": False},
    "a function in a shared module": {"module": False, "function": True, "between": False},
    "a function between units": {"module": False, "function": False, "between": True},
    "all of them": {"module": True, "function": True, "between": True},
}


def make(kind):
    torch.manual_seed(0)
    return Net(**KINDS[kind])


def batch(microbatch):
    return torch.randn(N, D, generator=torch.Generator().manual_seed(microbatch))


def backward_alone(kind, microbatches):
    model = make(kind)
    key = apply_keyed_dropout(model, 5)
    for microbatch in microbatches:
        key.begin(3, range(N * microbatch, N * (microbatch + 1)))
        with key.drawing():
            output = model(batch(microbatch))
        output.square().sum().backward()
    return model


class Stages:
    """Each stage in a module of its own that has let go of the others, as on its own rank."""

    def __init__(self, kind, starts, recompute=None):
        self.chains, self.keys = [], []
        for stage in range(len(starts)):
            model = make(kind)
            key = apply_keyed_dropout(model, 5)
            analysis = ModuleAnalysis(stacks=(Stack(blocks=BLOCKS),))
            if recompute is not None:
                apply_recompute(model, analysis=analysis, mode=recompute, dropout=key)
            units = find_units(model, (batch(0),), analysis)
            chain = StagedModule(model, units, starts, dropout=key)
            chain.settle((batch(0),))
            chain.keep({stage})
            self.chains.append(chain)
            self.keys.append(key)
        self.ends = {}

    def forward(self, microbatch):
        received, x = (), batch(microbatch)
        for stage, (chain, key) in enumerate(zip(self.chains, self.keys, strict=True)):
            key.begin(3, range(N * microbatch, N * (microbatch + 1)))
            with key.drawing():
                out = chain.run(stage, (x,), received)
            is_last = stage == len(self.chains) - 1
            self.ends[microbatch, stage] = (received, [out.square().sum()] if is_last else list(out))
            received = () if is_last else [tensor.detach().requires_grad_() for tensor in out]

    def backward(self, microbatch):
        grads = None
        for stage in reversed(range(len(self.chains))):
            received, outputs = self.ends.pop((microbatch, stage))
            torch.autograd.backward(outputs, grads)
            grads = [tensor.grad for tensor in received]

    def gradients(self):
        """One sum per name; a weight that several stages hold has one of each."""
        found = {}
        for chain in self.chains:
            for name, parameter in chain.model.named_parameters():
                found[name] = parameter.grad if name not in found else parameter.grad + found[name]
        return found


@pytest.mark.parametrize(
    ("kind", "starts"),
    [
        # Each kind with one of the two cuts; with the other in the soak.
        pytest.param(kind, starts, marks=[pytest.mark.soak] if (number + other) % 2 else [])
        for number, kind in enumerate(KINDS)
        for other, starts in enumerate([(0, 2, 4), (0, 1, 3)])
    ],
)
def test_stages_draw_the_bits_of_one_process(kind, starts):
    expected = backward_alone(kind, [0])
    stages = Stages(kind, starts)
    stages.forward(0)
    stages.backward(0)
    assert_alike(stages.gradients(), expected)


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_microbatches_in_flight_keep_their_own_bits(recompute):
    """The recompute of one comes after the forward pass of the next, which counts from 0 again."""
    expected = backward_alone("all of them", [0, 1, 2])
    stages = Stages("all of them", (0, 2, 4), recompute)
    stages.forward(0)
    stages.forward(1)
    stages.backward(0)
    stages.forward(2)
    stages.backward(1)
    stages.backward(2)
    assert_alike(stages.gradients(), expected)


def test_a_stage_that_drops_first_after_others_have_run_on_its_rank_draws_by_key():
    """The first pass of a rank may show no function that drops: a later stage of it may have one."""
    model, x = nn.Sequential(nn.Linear(D, D), Inner()), batch(0)
    key = apply_keyed_dropout(model, 5)
    chain = StagedModule(model, find_units(model, (x,), ModuleAnalysis()), [0, 1], dropout=key)
    chain.settle((x,))
    received = ()
    for stage in range(2):
        key.begin(0, range(N))
        with key.drawing():
            received = chain.run(stage, (x,), received)
    assert not key.foreign_draws()
    key.begin(0, range(N))
    with key.drawing():
        assert torch.equal(model(x), received)


def assert_alike(found, expected):
    assert found.keys() == {name for name, _ in expected.named_parameters()}
    for name, parameter in expected.named_parameters():
        if "inner" in name:
            # One sum per stage, added afterwards: the order of the sum is the plan's.
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found[name], parameter.grad), name
