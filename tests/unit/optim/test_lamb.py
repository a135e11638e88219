"""LAMB against You et al. 2019, algorithm 2, written out in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.optim.build import build_optimizer
from shoal.optim.config import OptimConfig


def adam_direction(g, m, v, t, *, beta1, beta2, eps):
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    return (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps), m, v


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_four_steps_follow_the_paper_and_a_bias_is_adamw(decay):
    random = np.random.default_rng(4)
    w, b = random.normal(size=(4, 6)), random.normal(size=4)
    model = nn.Linear(6, 4).double()
    model.load_state_dict({"weight": torch.from_numpy(w), "bias": torch.from_numpy(b)})
    config = OptimConfig(name="lamb", lr=0.3, betas=(0.8, 0.95), eps=1e-4, weight_decay=decay)
    optimizer = build_optimizer(config, model)
    mw, vw, mb, vb = np.zeros_like(w), np.zeros_like(w), np.zeros_like(b), np.zeros_like(b)
    for t in range(1, 5):
        g, gb = random.normal(size=w.shape), random.normal(size=b.shape)
        model.weight.grad, model.bias.grad = torch.from_numpy(g), torch.from_numpy(gb)
        r, mw, vw = adam_direction(g, mw, vw, t, beta1=0.8, beta2=0.95, eps=1e-4)
        move = r + decay * w
        # x <- x - eta phi(|x|) / |r + lambda x| (r + lambda x)
        w = w - 0.3 * np.linalg.norm(w) / np.linalg.norm(move) * move
        r, mb, vb = adam_direction(gb, mb, vb, t, beta1=0.8, beta2=0.95, eps=1e-4)
        b = b - 0.3 * r
        optimizer.step()
    np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(model.bias.detach().numpy(), b, rtol=1e-12, atol=1e-15)


def test_without_exemption_a_bias_has_a_trust_ratio_too():
    model = nn.Linear(1, 1, bias=True).double()
    with torch.no_grad():
        model.bias.fill_(4.0)
    model.bias.grad = torch.ones(1, dtype=torch.float64)
    build_optimizer(OptimConfig(name="lamb", lr=0.5, exempt_1d=False), model).step()
    # |x| / |r| = 4 and r = 1 up to eps: the step is lr * 4.
    assert model.bias.item() == pytest.approx(2.0, rel=1e-5)


def test_a_tensor_of_zeros_can_leave_zero():
    model = nn.Linear(2, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.ones(2, 2, dtype=torch.float64)
    build_optimizer(OptimConfig(name="lamb", lr=0.1), model).step()
    np.testing.assert_allclose(model.weight.detach().numpy(), -0.1 * np.ones((2, 2)), rtol=1e-5)


def test_a_parameter_that_joins_later_has_its_own_count():
    model = nn.Linear(2, 2).double()
    optimizer = build_optimizer(OptimConfig(name="lamb"), model)
    model.weight.grad = torch.ones(2, 2, dtype=torch.float64)
    optimizer.step()
    model.bias.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in (model.weight, model.bias)] == [2, 1]


def test_gradients_are_left_as_they_were():
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    build_optimizer(OptimConfig(name="lamb"), model).step()
    assert all(parameter.grad.unique().tolist() == [0.5] for parameter in model.parameters())
