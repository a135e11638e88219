"""Local steps and their normalised direction: where plain averaging goes wrong, and where it does not."""

import pytest
import torch

from shoal.core.errors import RequestError, RunError
from shoal.paramserver.consistency import fednova_factors as factors
from shoal.paramserver.server.shard import fednova
from shoal.paramserver.worker.own_steps import LocalSettings, effective_steps, train_locally

# Two quadratics 1/2 h (w - c)^2 of different centres and curvatures; shares of 1/4 and 3/4.
CENTRES = torch.tensor([[1.0, -2.0, 0.5], [-3.0, 4.0, 2.0]], dtype=torch.float64)
CURVATURES = torch.tensor([[1.0, 0.5, 2.0], [0.7, 1.5, 1.0]], dtype=torch.float64)
SHARES = [0.25, 0.75]


def objective(worker):
    return lambda weights, _step: CURVATURES[worker] * (weights - CENTRES[worker])


def minimiser():
    weighted = CURVATURES * torch.tensor(SHARES, dtype=torch.float64)[:, None]
    return (weighted * CENTRES).sum(0) / weighted.sum(0)


def updates(settings, num_updates, update):
    weights = torch.zeros(3, dtype=torch.float64)
    for _ in range(num_updates):
        done = [train_locally(weights, objective(worker), one) for worker, one in enumerate(settings)]
        weights = update(weights, done)
    return weights


def by_fednova(weights, done, rate=0.001):
    pushed = zip(done, factors(SHARES, [one.steps for one in done]), strict=True)
    return weights - rate * sum(factor * one.direction for one, factor in pushed)


def by_averaging(weights, done, span=1.0):
    """The mean of the workers' weights; stretched, it goes further in that direction, and comes to rest at the same place."""
    moved = [one.direction * one.rate * one.steps for one in done]
    return weights - span * sum(share * one for share, one in zip(SHARES, moved, strict=True))


@pytest.mark.parametrize(
    "others",
    [
        {"steps": 20, "lr": 0.001},
        {"steps": 1, "lr": 0.001},
        {"steps": 10, "lr": 0.002},
        {"steps": 8, "lr": 0.001, "momentum": 0.9},
    ],
    ids=str,
)
def test_unequal_workers_reach_the_minimiser_of_the_mean(others):
    """Steps of these sizes move the weights little, so what is left is the inconsistency itself, not the drift of long ones."""
    settings = [LocalSettings(steps=2, lr=0.001), LocalSettings(**others)]
    found = updates(settings, 300, lambda weights, done: by_fednova(weights, done, 0.05))
    distance = torch.linalg.vector_norm(found - minimiser())
    assert distance < 0.05
    wrong = updates(settings, 300, lambda weights, done: by_averaging(weights, done, 50.0))
    assert torch.allclose(
        wrong, updates(settings, 310, lambda weights, done: by_averaging(weights, done, 50.0)), atol=1e-3
    )
    assert torch.linalg.vector_norm(wrong - minimiser()) > 4 * max(distance, torch.tensor(0.05)), (
        "plain averaging does not"
    )


def test_equal_workers_are_averaged_as_ever():
    settings = [LocalSettings(steps=4, lr=0.1)] * 2
    assert torch.allclose(
        updates(settings, 30, lambda w, done: by_fednova(w, done, 0.1)), updates(settings, 30, by_averaging)
    )


def test_what_is_pushed_makes_what_the_servers_formula_makes():
    weights = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    settings = [LocalSettings(steps=3, lr=0.1, batch=4), LocalSettings(steps=7, lr=0.05)]
    done = [train_locally(weights, objective(worker), one, version=6) for worker, one in enumerate(settings)]
    ended = [weights - one.direction * one.rate * one.steps for one in done]
    steps, rates = [one.steps for one in done], [one.rate for one in done]
    theirs = fednova(weights, ended, shares=SHARES, steps=steps, rates=rates, rate=0.2)
    assert torch.allclose(by_fednova(weights, done, 0.2), theirs, rtol=1e-12)
    assert [one.num_samples for one in done] == [12, 7] and done[0].version == 6


def test_one_step_is_a_gradient():
    weights = torch.ones(3, dtype=torch.float64)
    done = train_locally(weights, objective(0), LocalSettings(steps=1, lr=0.5))
    assert torch.allclose(done.direction, objective(0)(weights, 0), rtol=1e-12)
    assert torch.equal(weights, torch.ones(3, dtype=torch.float64)), "the servers' weights are left alone"


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_effective_steps_are_what_a_constant_gradient_moves(steps, momentum):
    settings = LocalSettings(steps=steps, lr=0.1, momentum=momentum)
    done = train_locally(torch.zeros(3, dtype=torch.float64), lambda weights, _: torch.ones_like(weights), settings)
    assert torch.allclose(done.direction, torch.ones(3, dtype=torch.float64))
    assert done.steps == effective_steps(steps, momentum)
    assert effective_steps(steps, momentum) == pytest.approx(
        sum(sum(momentum**power for power in range(steps - step)) for step in range(steps))
    )


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"momentum": 1.0}, {"batch": 0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(RequestError, match="must be at least 1"):
        LocalSettings(**{"steps": 2, "lr": 0.1, **wrong})


def test_steps_into_the_void_and_wrong_gradients_are_refused():
    weights = torch.ones(3)
    with pytest.raises(RunError, match="out of the finite numbers"):
        train_locally(weights, lambda local, _: -local * 1e30, LocalSettings(steps=3, lr=1.0))
    with pytest.raises(RunError, match="local step 0 gave a gradient"):
        train_locally(weights, lambda local, _: local.double(), LocalSettings(steps=3, lr=1.0))


def test_factors_add_up_to_the_steps_and_refuse_nonsense():
    assert factors([1, 3], [4.0, 8.0]) == [7.0 * 0.25, 7.0 * 0.75]
    for shares, steps in (([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([-1.0, 2.0], [1.0, 1.0])):
        with pytest.raises(RequestError, match="directions with shares"):
            factors(shares, steps)
