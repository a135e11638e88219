"""A look at a module leaves nothing behind."""

import random

import numpy as np
import torch
from torch import nn

from shoal.costs.tracer import preserved_state
from shoal.telemetry.draws import keeping_draws


def draws():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()


def test_what_is_drawn_inside_moves_no_generator():
    model = nn.Linear(2, 2)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for look in (keeping_draws(), preserved_state(model, training=True)):
        with look:
            inside = draws()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert draws() == inside, "the next draws are those that the look had"
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def test_modes_and_buffers_are_as_before():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[1].eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserved_state(model, training=True):
        assert model[1].training
        model(torch.rand(4, 2))
    assert model[0].training and not model[1].training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
