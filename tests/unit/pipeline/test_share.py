"""Sums of a weight that several stages hold, on one rank that has them all."""

import pytest
import torch
from torch import nn

from shoal.pipeline.share import SharedGradients
from shoal.schedules.catalogue import make_schedule


def shared_by_two_stages():
    """The first rank of a V has the first stage and the last, which share a weight."""
    weight = nn.Parameter(torch.ones(2))
    grid = make_schedule("zbv", ranks=2, microbatches=4).grid
    return weight, SharedGradients({"tied": weight}, {"tied": frozenset({0, 3})}, grid=grid, rank=0, p2p=None)


@pytest.mark.parametrize(
    ("by_stage", "total"),
    [
        ({0: [1.0, 2.0], 3: [4.0]}, 7.0),
        ({3: [4.0]}, 4.0),
        ({0: [None], 3: [4.0, None]}, 4.0),
        ({0: [None], 3: [None]}, None),
    ],
)
def test_what_no_stage_has_touched_has_no_gradient(by_stage, total):
    """None and not zeros: one process has none, and its optimizer leaves the weight alone."""
    weight, shared = shared_by_two_stages()
    for stage, values in by_stage.items():
        for value in values:
            with shared.stage(stage):
                if value is not None:
                    (weight.sum() * value).backward()
    shared.finish()
    assert weight.grad is None if total is None else weight.grad.tolist() == [total] * 2
