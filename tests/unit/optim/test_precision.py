"""Precisions: the types that really come out of a layer, and the loss scale's life."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.optim.build import build_optimizer
from shoal.optim.config import OptimConfig
from shoal.optim.precision import GROWTH_EVERY, HIGHEST_SCALE, LossScale, Precision


@pytest.mark.parametrize(
    ("name", "output", "weight"),
    [
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.float32),
        ("float16", torch.float16, torch.float32),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_types_of_outputs_weights_gradients_and_state(name, output, weight):
    torch.manual_seed(0)
    precision = Precision.named(name)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(dtype=precision.weight_dtype)
    optimizer = build_optimizer(OptimConfig(), model)
    x = precision.cast_input(torch.randn(5, 1, 4, 4))
    with precision.autocast("cpu"):
        y = model(x)
        loss = F.cross_entropy(y, torch.tensor([0, 1, 2, 0, 1]))
    loss.backward()
    optimizer.step()
    assert y.dtype == output
    parameters = list(model.parameters())
    assert {parameter.dtype for parameter in parameters} == {weight}
    assert {parameter.grad.dtype for parameter in parameters} == {weight}
    assert {optimizer.state[parameter]["exp_avg"].dtype for parameter in parameters} == {weight}


def test_whole_numbers_and_masks_are_not_cast():
    double = Precision.named("float64")
    for tensor in (torch.tensor([1, 2]), torch.tensor([True]), torch.tensor([3], dtype=torch.uint8)):
        assert double.cast_input(tensor) is tensor
    assert double.cast_input(torch.ones(2)).dtype == torch.float64


def test_only_float16_scales_the_loss():
    scaling = {name: Precision.named(name).scales_loss for name in ("float32", "bfloat16", "float16", "float64")}
    assert scaling == {"float32": False, "bfloat16": False, "float16": True, "float64": False}
    assert Precision.named("float16").first_loss_scale == LossScale(scale=65536.0)
    assert Precision.named("bfloat16").first_loss_scale == LossScale(scale=1.0)


def test_scale_doubles_after_two_thousand_good_steps_in_a_row():
    state = LossScale()
    for _ in range(GROWTH_EVERY - 1):
        state = state.after_step(True)
    assert state == LossScale(scale=2.0**16, good_steps=1999)
    assert state.after_step(True) == LossScale(scale=2.0**17, good_steps=0)
    assert state.after_step(False) == LossScale(scale=2.0**15, good_steps=0)


def test_scale_stays_between_its_floor_and_ceiling():
    low = LossScale(scale=2.0)
    assert low.can_back_off
    assert low.after_step(False) == LossScale(scale=1.0)
    assert low.after_step(False).after_step(False) == LossScale(scale=1.0)
    assert not LossScale(scale=1.0).can_back_off
    high = LossScale(scale=HIGHEST_SCALE, good_steps=GROWTH_EVERY - 1)
    assert high.after_step(True).scale == HIGHEST_SCALE


def test_dynamic_scaling_skips_overflows_and_then_trains():
    """A gradient near 1 overflows float16 at 2^17 and fits after two halvings; without the scale, one of 1e-9 vanishes."""
    precision = Precision.named("float16")
    weight = nn.Parameter(torch.ones(1, 1))
    state, skipped = LossScale(scale=2.0**17), []
    for _ in range(4):
        weight.grad = None
        with precision.autocast("cpu"):
            loss = F.linear(torch.ones(1, 1), weight).float().sum()
        (loss * state.scale).backward()
        finite = bool(torch.isfinite(weight.grad).all())
        skipped.append(not finite)
        state = state.after_step(finite)
    assert skipped == [True, True, False, False]
    assert float(weight.grad) / state.scale == 1.0

    def small_gradient(scale: float) -> float:
        weight.grad = None
        with precision.autocast("cpu"):
            loss = F.linear(torch.ones(1, 1), weight).float().sum() * 1e-9
        (loss * scale).backward()
        return float(weight.grad) / scale

    assert small_gradient(1.0) == 0.0
    assert small_gradient(2.0**16) == pytest.approx(1e-9, rel=1e-2)


ENDS = torch.tensor([4, 4, 8], dtype=torch.int32)
"""Three groups, of which the second is empty, as an expert that no token chose."""
SHAPES = [((8, 4), (3, 4, 8)), ((4, 8), (8, 8)), ((3, 4, 8), (8, 8))]


@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_grouped_products_are_there_in_float64_and_float32_keeps_its_bits(first, second):
    torch.manual_seed(1)
    one, two = torch.randn(first, requires_grad=True), torch.randn(second, requires_grad=True)
    before = F.grouped_mm(one, two, offs=ENDS)
    Precision.named("float64")
    assert torch.equal(F.grouped_mm(one, two, offs=ENDS), before)
    wide = [tensor.detach().double().requires_grad_() for tensor in (one, two)]
    product = F.grouped_mm(*wide, offs=ENDS)
    torch.testing.assert_close(product.float(), before)
    torch.autograd.gradcheck(lambda a, b: F.grouped_mm(a, b, offs=ENDS), wide)
