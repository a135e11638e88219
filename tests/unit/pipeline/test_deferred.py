"""Gradients of matrices that are made later, against autograd's, bit for bit."""

import contextlib
import copy
import weakref

import pytest
import torch
from torch import nn

from shoal.pipeline.deferred import DeferredGradients, defer_weight_gradients

SHAPES = {"2-D": (5, 8), "3-D": (2, 5, 8), "4-D": (2, 3, 2, 8)}


class Net(nn.Module):
    """Two layers and something between them; the second may be used several times."""

    def __init__(self, *, bias: bool, uses: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=bias), nn.Linear(16, 16, bias=bias)
        self.norm = nn.LayerNorm(16)
        self.uses = uses

    def forward(self, x):
        x = torch.relu(self.first(x))
        for _ in range(self.uses):
            x = torch.tanh(self.norm(self.second(x)))
        return x.float().square().sum()


def both(model, shape, *, microbatches=1, context=contextlib.nullcontext, wanted=True):
    """Two copies after the same microbatches, plain and deferred, and their inputs."""
    plain, split = copy.deepcopy(model), copy.deepcopy(model)
    found = []
    for number in range(microbatches):
        torch.manual_seed(number)
        x = torch.randn(shape)
        ours, theirs = x.clone().requires_grad_(wanted), x.clone().requires_grad_(wanted)
        with context():
            loss = plain(theirs)
        loss.backward()
        later = DeferredGradients()
        with context(), defer_weight_gradients(later):
            mine = split(ours)
        assert torch.equal(mine, loss)
        before = split.second.weight.grad.clone() if number else None
        mine.backward()
        untouched = split.second.weight.grad
        assert untouched is None if before is None else torch.equal(untouched, before)
        later.run()
        found.append((theirs, ours))
    return plain, split, found


def assert_equal(plain, split, inputs):
    for (name, one), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad), name
        # A gradient with a history would keep the activations.
        assert one.grad.dtype == other.grad.dtype and other.grad.grad_fn is None
    for theirs, ours in inputs:
        assert theirs.grad is None if ours.grad is None else torch.equal(theirs.grad, ours.grad)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_gradients_are_autograds(shape, bias, context):
    torch.manual_seed(0)
    assert_equal(*both(Net(bias=bias), shape, context=context))


@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_over_several_microbatches_with_several_uses_of_a_layer(uses, context):
    """Autograd adds the uses of one pass to each other, in the pass's own type, before it adds them to what is there."""
    torch.manual_seed(0)
    assert_equal(*both(Net(bias=True, uses=uses), (2, 5, 8), microbatches=4, context=context))


def test_an_input_that_wants_no_gradient_gets_none():
    torch.manual_seed(0)
    plain, split, inputs = both(Net(bias=True), (2, 5, 8), wanted=False)
    assert_equal(plain, split, inputs)
    assert inputs[0][1].grad is None


def test_an_input_that_does_not_lie_in_order():
    class Turned(Net):
        def forward(self, x):
            return super().forward(x.transpose(0, 1))

    torch.manual_seed(0)
    assert_equal(*both(Turned(bias=True), (4, 3, 8)))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_what_is_frozen_is_left_alone(part):
    torch.manual_seed(0)
    model = Net(bias=True)
    getattr(model.first, part).requires_grad_(False)
    x, later = torch.randn(5, 8), DeferredGradients()
    with defer_weight_gradients(later):
        loss = model(x)
    loss.backward()
    later.run()
    assert getattr(model.first, part).grad is None
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


def test_nothing_is_noted_without_grad_mode():
    model, later, x = Net(bias=True), DeferredGradients(), torch.randn(5, 8)
    with torch.no_grad(), defer_weight_gradients(later):
        found = model(x)
    assert not found.requires_grad and torch.equal(found, model(x))
    later.run()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_run_is_not_run_again():
    model, later = Net(bias=False), DeferredGradients()
    with defer_weight_gradients(later):
        loss = model(torch.randn(5, 8))
    loss.backward()
    later.run()
    once = model.first.weight.grad.clone()
    later.run()
    assert torch.equal(model.first.weight.grad, once)


def test_layers_outside_are_autograds_own():
    model, later = Net(bias=False), DeferredGradients()
    with defer_weight_gradients(later):
        pass
    model(torch.randn(5, 8)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_put_off_does_not_hold_the_input_of_the_stage():
    model, later = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), DeferredGradients()
    x = torch.randn(2, 8, requires_grad=True)
    with defer_weight_gradients(later):
        model(x).sum().backward()
    held = weakref.ref(x)
    del x
    assert held() is None
    later.run()
    assert model[1].weight.grad is not None
