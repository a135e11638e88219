"""An optimizer object of a script: what is kept of it, and what is refused with the reason."""

import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.optim.given import GivenOptimizer


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))


class Normed(torch.optim.SGD):
    """Looks at all elements of a tensor together, which shards do not have."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class Late(torch.optim.Optimizer):
    """Makes its state at its first step, and says nobody how."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter].setdefault("held", torch.zeros_like(parameter))
                held.add_(parameter.grad)
                parameter.sub_(held, alpha=group["lr"])


def test_groups_keep_their_values_and_order_and_get_other_tensors():
    model = model_of()
    groups = [{"params": [model[1].weight, model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    updated = {name: nn.Parameter(torch.zeros(4)) for name in ("0.weight", "1.weight")}
    adopted = GivenOptimizer(optimizer, model).adopt(updated)
    assert adopted is optimizer is scheduler.optimizer
    assert adopted.param_groups[0]["params"] == [updated["1.weight"], updated["0.weight"]]
    assert adopted.param_groups[1]["params"] == [] and adopted.param_groups[1]["lr"] == 0.25


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: torch.optim.Adam(model_of().parameters()), "is no parameter of Sequential"),
        (lambda model: torch.optim.Adam(model.parameters(), foreach=True), "foreach=True"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "asks for the loss several times"),
        (lambda model: Normed(model.parameters(), lr=0.1), "depends on other elements"),
        (lambda model: Late(model.parameters(), lr=0.1), "appears at its first step"),
        (lambda model: torch.optim.Adam([one.requires_grad_(False) for one in model.parameters()]), "that is trained"),
        (lambda model: "adam", "give an object of a torch.optim class"),
    ],
)
def test_what_cannot_be_cut_into_shards_is_refused_with_the_reason(make, words):
    model = model_of()
    with pytest.raises(RequestError, match=words):
        GivenOptimizer(make(model), model)


def test_an_optimizer_that_was_stepped_is_refused():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(RequestError, match="has taken steps"):
        GivenOptimizer(optimizer, model)
