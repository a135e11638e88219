"""A search for the learning rate finds what one process finds, and leaves a run as it was."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.callbacks.ratefinder import has_diverged, steepest
from shoal.testing.ranks import run_on_ranks

PLANS = ("dp=2", "dp=2 zero=1", "dp=2 zero=3")


def dataset():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def train(world, plan, *, searches):
    """Some steps, with a search in between or without one."""
    with shoal.Run(plan=plan, seed=3, world=world, batch_norm="sync") as run:
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
        groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": [*model[1:].parameters()], "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups)
        loader = run.loader(dataset(), global_batch=16)
        model, optimizer = run.setup(model, optimizer, loss=nn.CrossEntropyLoss())
        curve = None
        losses = []
        for step, batch in enumerate(loader.steps(6)):
            losses.append(run.step(batch).loss)
            if searches and step == 2:
                curve = asdict(shoal.find_rate(run, loader, low=1e-5, high=10.0, num_steps=30))
        state = run.state_dict(whole=True)
        rates = [group["lr"] for group in optimizer.param_groups]
        return losses, {name: one.clone() for name, one in (state or {}).items()}, rates, curve, run.step_count


def both(world, plan):
    return train(world, plan, searches=True), train(world, plan, searches=False)


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return both(None, "dp=1")


def same_run(one, other):
    assert one[0] == other[0] and one[2] == other[2] and one[4] == other[4] == 6
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


def test_a_run_that_searched_is_one_that_did_not(alone):
    searched, plain = alone
    same_run(searched, plain)
    curve = searched[3]
    rates, losses = curve["rates"], curve["losses"]
    assert rates[0] == pytest.approx(1e-5) and rates[1] / rates[0] == pytest.approx(1e6 ** (1 / 29))
    assert len(rates) == len(losses) and min(losses) < 0.8 * losses[0], "weights moved during the search"
    assert curve["suggestion"] is not None and 1e-4 < curve["suggestion"] < 10.0


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_search_as_one_process_does(plan, alone):
    (searched, plain), _ = run_on_ranks(both, 2, plan, deadline_seconds=60.0)
    same_run(searched, plain)
    ours, theirs = searched[3], alone[0][3]
    # Only while rates are too low to amplify the order of sums.
    assert ours["rates"][:15] == theirs["rates"][:15]
    assert ours["losses"][:15] == pytest.approx(theirs["losses"][:15], rel=1e-5)


def test_a_search_ends_where_losses_diverge_and_suggests_where_they_fall():
    assert has_diverged([1.0, float("nan")]) and not has_diverged([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert has_diverged([1.0] * 5 + [100.0]) and not has_diverged([1.0, 100.0])
    rates = [10.0**power for power in range(-6, 1)]
    assert steepest(rates, [2.0, 2.0, 2.0, 1.0, 0.9, 0.9, 5.0]) in (1e-4, 1e-3)
    assert steepest(rates, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]) is None


def test_a_wrong_range_is_refused():
    with shoal.Run(plan="dp=1") as run:
        model = nn.Linear(8, 2)
        run.loader(dataset(), global_batch=16)
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss())
        with pytest.raises(shoal.RequestError, match=r"low=1\.0, high=0\.1"):
            shoal.find_rate(run, low=1.0, high=0.1)
