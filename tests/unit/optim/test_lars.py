"""LARS against You, Gitman & Ginsburg 2017, written out in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.optim.build import build_optimizer
from shoal.optim.config import OptimConfig
from shoal.optim.layerwise import scaled_sum, trust_ratios


def lars_step(w, g, v, *, lr, momentum, decay, trust):
    """Algorithm 1, with equation 6: lambda = eta |w| / (|g| + beta |w|)."""
    local_rate = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
    v = momentum * v + lr * local_rate * (g + decay * w)
    return w - v, v


def model_of(weight: np.ndarray, bias: np.ndarray, dtype: torch.dtype = torch.float64) -> nn.Linear:
    model = nn.Linear(weight.shape[1], weight.shape[0]).to(dtype=dtype)
    model.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)})
    return model


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_four_steps_follow_the_paper_and_a_bias_is_plain_momentum(decay):
    random = np.random.default_rng(3)
    w, b = random.normal(size=(4, 6)), random.normal(size=4)
    model = model_of(w, b)
    config = OptimConfig(name="lars", lr=0.7, momentum=0.8, weight_decay=decay, trust=0.02)
    optimizer = build_optimizer(config, model)
    v, vb = np.zeros_like(w), np.zeros_like(b)
    for _ in range(4):
        g, gb = random.normal(size=w.shape), random.normal(size=b.shape)
        model.weight.grad, model.bias.grad = torch.from_numpy(g), torch.from_numpy(gb)
        w, v = lars_step(w, g, v, lr=0.7, momentum=0.8, decay=decay, trust=0.02)
        vb = 0.8 * vb + 0.7 * gb
        b = b - vb
        optimizer.step()
    np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(model.bias.detach().numpy(), b, rtol=1e-13, atol=1e-15)


def test_the_ratio_is_of_each_tensor_alone():
    """Doubling one layer's gradient must leave the length of its own first step, and the other layer, as they were."""

    def first_step(factor: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, scale in zip(model.parameters(), (factor, 1.0), strict=True):
            parameter.grad = scale * torch.ones_like(parameter)
        build_optimizer(OptimConfig(name="lars", lr=0.1), model).step()
        return [(now.detach() - then) for now, then in zip(model.parameters(), before, strict=True)]

    torch.testing.assert_close(first_step(1.0), first_step(8.0), rtol=1e-12, atol=0)


def test_a_tensor_of_zeros_can_leave_zero():
    model = model_of(np.zeros((2, 2)), np.zeros(2))
    model.weight.grad = torch.ones(2, 2, dtype=torch.float64)
    build_optimizer(OptimConfig(name="lars", lr=0.1), model).step()
    np.testing.assert_allclose(model.weight.detach().numpy(), -0.1 * np.ones((2, 2)))


def test_a_parameter_without_gradient_and_a_closure():
    model = model_of(np.ones((2, 2)), np.ones(2))
    optimizer = build_optimizer(OptimConfig(name="lars", lr=0.1, momentum=0.0), model)

    def closure() -> float:
        model.weight.grad = torch.ones(2, 2, dtype=torch.float64)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert model.bias.tolist() == [1.0, 1.0]
    assert model.weight.detach().unique().item() != 1.0


def test_gradients_are_left_as_they_were():
    model = model_of(np.ones((2, 2)), np.ones(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    build_optimizer(OptimConfig(name="lars"), model).step()
    assert all(parameter.grad.unique().tolist() == [0.5] for parameter in model.parameters())


def test_ratio_is_the_quotient_and_one_where_a_norm_is_zero_or_not_finite():
    numerators = torch.tensor([3.0, 0.0, 3.0, 0.0, float("inf"), float("nan")], dtype=torch.float64)
    denominators = torch.tensor([4.0, 4.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    ratios = trust_ratios(numerators, denominators, torch.float32)
    assert [ratio.item() for ratio in ratios] == [0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert all(ratio.dtype == torch.float32 and ratio.ndim == 0 for ratio in ratios)


def test_scaled_sum_leaves_its_inputs_alone():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    (total,) = scaled_sum([first], [second], 0.5)
    assert total.tolist() == [6.0, 12.0]
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [10.0, 20.0])
