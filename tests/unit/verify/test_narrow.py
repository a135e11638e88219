"""Weights that a model reads in float32 in a float64 proof: Gemma under cp was said to differ, 1e-7 in its norms' gradients."""

import pytest
import torch
from torch import nn

from shoal.core.plan import Plan
from shoal.optim.config import OptimConfig
from shoal.verify.narrow import find_narrow
from shoal.verify.tolerance import derive_tolerance


class Norm(nn.Module):
    """RMSNorm that computes in float32, with its weight in float32 too, or its activations alone."""

    def __init__(self, use):
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.zeros(4)), use

    def forward(self, x):
        wide = x.float()
        return self.use(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6), self.weight).to(x.dtype)


@pytest.mark.parametrize(
    ("use", "is_narrow"),
    [
        (lambda x, weight: x * (1.0 + weight.float()), True),
        (lambda x, weight: x * (1.0 + weight).to(torch.float32), True),
        (lambda x, weight: x * weight.unsqueeze(0).float(), True),
        (lambda x, weight: x.double() * weight, False),
        (lambda x, weight: x.double() * (1.0 + weight), False),
    ],
)
def test_a_weight_that_is_cast_is_found_and_activations_that_are_cast_are_not(use, is_narrow):
    model = nn.Sequential(nn.Embedding(5, 4), Norm(use), nn.Linear(4, 3)).double()
    loss = model(torch.tensor([[0, 1, 2]])).sum()
    assert find_narrow(loss, model.named_parameters()) == (["1.weight"] if is_narrow else [])


@pytest.mark.parametrize(
    ("plan", "precision", "bound"), [("cp=2", "float64", 1e-6), ("cp=2", "float32", 1e-5), ("dp=2", "float64", 0.0)]
)
def test_only_split_sums_of_float64_are_bounded_by_it(plan, precision, bound):
    found = derive_tolerance(
        Plan.parse(plan),
        precision=precision,
        depth=2,
        adds_in_order=True,
        joins_replicas=False,
        optim=OptimConfig(),
        total_steps=4,
        steps=3,
        narrow=["norm.weight", "last.weight"],
    )
    assert found.bound == bound
    assert ("the model reads norm.weight and 1 more in float32 by itself" in found.reason) == (bound == 1e-6)
