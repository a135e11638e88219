"""The papers' rules on quadratics that are small enough to be worked out by hand."""

import copy

import pytest
import torch
from torch import Tensor, nn

from shoal.verify.oracle.delayed import Delay, Oracle

RATE = 0.5


class Product(nn.Module):
    """w_1 w_2 ... w_n x: one number per stage."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in values)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = x * w
        return x


def oracle(model: nn.Module, delay: Delay, xs, stages=None) -> Oracle:
    """Half the square of what the model puts out, with plain gradient steps."""
    named = dict(model.named_parameters())
    stages = stages or [[name] for name in named]
    optimizers = [torch.optim.SGD([named[name] for name in names], lr=RATE) for names in stages]
    return Oracle(model, stages, delay, optimizers, lambda run, b: run(torch.tensor(xs[b])).square() / 2)


def weights(model):
    return [w.item() for w in model.w]


def test_weight_stashing_by_hand():
    """Two stages, x = 1, loss (ab)^2 / 2, gradients a b^2 and a^2 b. Stage 1 is one update behind, stage 2 is not.

    t=0: a0=2, b0=1: gradients 2, 4             -> a=1, b=-1
    t=1: a0=2, b1=-1: gradients 2, -4           -> a=0, b=1
    t=2: a1=1, b2=1: gradients 1, 1             -> a=-0.5, b=0.5
    """
    model = Product(2.0, 1.0)
    asked = oracle(model, Delay.STASHED, [1.0] * 3)
    found = []
    for microbatch in range(3):
        loss = asked.take([microbatch])
        found.append((loss.item(), weights(model)))
    assert found == [(2.0, [1.0, -1.0]), (2.0, [0.0, 1.0]), (0.5, [-0.5, 0.5])]


def test_vertical_sync_by_hand():
    """The same with both stages one update behind.

    t=0: a0=2, b0=1: gradients 2, 4             -> a=1, b=-1
    t=1: a0=2, b0=1: gradients 2, 4             -> a=0, b=-3
    t=2: a1=1, b1=-1: gradients 1, -1           -> a=-0.5, b=-2.5
    """
    model = Product(2.0, 1.0)
    asked = oracle(model, Delay.VERTICAL, [1.0] * 3)
    found = []
    for microbatch in range(3):
        asked.take([microbatch])
        found.append(weights(model))
    assert found == [[1.0, -1.0], [0.0, -3.0], [-0.5, -2.5]]


def test_double_buffering_by_hand():
    """One weight, loss (w x)^2 / 2, gradient w x^2, summed over two microbatches, x = 1 and 2: 5 w. One version behind.

    t=0: w0=1: gradient 5                       -> w=-1.5
    t=1: w0=1: gradient 5                       -> w=-4
    t=2: w1=-1.5: gradient -7.5                 -> w=-0.25
    """
    model = Product(1.0)
    asked = oracle(model, Delay.BUFFERED, [1.0, 2.0] * 3)
    found = []
    for start in (0, 2, 4):
        loss = asked.take([start, start + 1])
        found.append((loss.item(), weights(model)[0], asked.gradients()["w.0"].item()))
    assert found == [(2.5, -1.5, 5.0), (2.5, -4.0, 5.0), (5.625, -0.25, -7.5)]


@pytest.mark.parametrize(
    ("delay", "versions"),
    [
        (Delay.STASHED, [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]),
        (Delay.VERTICAL, [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]]),
        (Delay.BUFFERED, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 2, 2]]),
    ],
)
def test_the_versions_of_three_stages(delay, versions):
    asked = oracle(Product(1.0, 1.0, 1.0), delay, [])
    assert [[asked.version(stage, update) for stage in range(3)] for update in range(4)] == versions


@pytest.mark.parametrize("delay", [Delay.STASHED, Delay.VERTICAL])
def test_with_one_stage_it_is_plain_gradient_descent(delay):
    torch.manual_seed(0)
    xs = torch.randn(6, dtype=torch.float64).tolist()
    model = Product(0.7, -1.3, 0.4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    asked = oracle(model, delay, xs, stages=[["w.0", "w.1", "w.2"]])
    for microbatch, x in enumerate(xs):
        asked.take([microbatch])
        optimizer.zero_grad()
        (plain(torch.tensor(x)).square() / 2).backward()
        optimizer.step()
        assert weights(model) == weights(plain)


def test_the_caller_sees_gradients_before_each_stages_update():
    model, seen = Product(2.0, 1.0), []
    asked = oracle(model, Delay.STASHED, [1.0] * 2)
    asked.before_update = lambda stage, microbatch: seen.append((stage, microbatch, model.w[stage].grad.item()))
    asked.take([0])
    asked.take([1])
    assert seen == [(0, 0, 2.0), (1, 0, 4.0), (0, 1, 2.0), (1, 1, -4.0)]
