"""Downpour over real servers: pushing and fetching each step it is plain training, else the loop of the paper, to the bit."""

import json

import pytest
import torch

from shoal.core.plan import Plan
from shoal.optim.build import build_optimizer, decide_groups
from shoal.paramserver.worker.flat import trained_parameters
from shoal.serverrun.server.checkpointing import read_checkpoint
from shoal.serverrun.worker.process import build_worker
from support.paramserver.run_in_process import place_in, recipe_of, run_alone, run_inside

STEPS = 6


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_pushing_and_fetching_each_step_is_plain_training(tmp_path, optimizer):
    recipe = recipe_of(f"optim.name={optimizer}")
    found = run_inside(tmp_path, "ps=2 workers=1 update=downpour:1,1", recipe)
    assert found.sha256 == run_alone(recipe)
    assert [step["step"] for step in found.steps] == [1, 2, 3, 4, 5, 6]


def by_hand(tmp_path, recipe, push_every, fetch_every, local_lr):
    """Algorithm 7.1 of the paper over one worker, with one torch optimizer as the server."""
    plan = Plan.parse(f"ps=1 workers=1 update=downpour:{push_every},{fetch_every}")
    worker = build_worker(place_in(tmp_path, "worker", 0, plan, recipe), None)
    model = worker.shares.model.model
    held = {name: torch.nn.Parameter(one.detach().clone()) for name, one in trained_parameters(model).items()}
    optimizer = build_optimizer(
        recipe.optim, torch.nn.Module(), updated=held, groups=decide_groups(recipe.optim, model)
    )
    accrued = {name: torch.zeros_like(one) for name, one in held.items()}

    def push():
        for name, one in held.items():
            one.grad = accrued[name].clone()
            accrued[name].zero_()
        optimizer.step()

    for step in range(STEPS):
        with torch.no_grad():
            if step % fetch_every == 0:
                for name, one in trained_parameters(model).items():
                    one.copy_(held[name])
        worker.shares.run(step, 0)
        with torch.no_grad():
            for name, one in trained_parameters(model).items():
                accrued[name] += one.grad
                one.add_(one.grad, alpha=-local_lr)
        if step % push_every == 0:
            push()
    if any(one.any() for one in accrued.values()):
        push()
    return held


@pytest.mark.parametrize(("push_every", "fetch_every"), [(2, 2), (3, 2)])
def test_gathering_is_the_loop_of_the_paper(tmp_path, push_every, fetch_every):
    recipe = recipe_of("optim.name=adagrad", "paramserver.local_lr=0.05")
    found = run_inside(tmp_path, f"ps=2 workers=1 update=downpour:{push_every},{fetch_every}", recipe)
    expected = by_hand(tmp_path, recipe, push_every, fetch_every, 0.05)
    assert all(torch.equal(found.weights[name], one) for name, one in expected.items())


def test_several_workers_with_background_fetches_do_every_unit_once(tmp_path):
    recipe = recipe_of("optim.name=adagrad", "paramserver.overlap=true", "paramserver.warm_start=3", "train.steps=10")
    found = run_inside(tmp_path, "ps=2 workers=2 update=downpour:2,3", recipe)
    assert found.steps[-1]["step"] == 10
    *_, text = read_checkpoint(found.run_dir)
    update_log = json.loads(text)
    assert (update_log["portions"]["opened"], update_log["portions"]["todo"], update_log["portions"]["doing"]) == (
        10,
        [],
        [],
    )
    assert (update_log["duplicates"], update_log["dropped"], update_log["pending"]) == (0, 0, [])


def test_the_checkpoint_that_gradients_came_from_is_kept_beside_the_newest(tmp_path):
    """Nobody has computed with the newest yet, and it may be the one that no finite gradient comes from."""
    recipe = recipe_of("checkpoint.every=1", "checkpoint.keep=1", "train.steps=4")
    found = run_inside(tmp_path, "ps=2 workers=1", recipe)
    kept = sorted(path.name for path in (found.run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000004"]
