"""Workers with different numbers of local steps in a running job: none decides more than its samples do."""

import pytest
import torch

from shoal.core.plan import Plan
from shoal.paramserver.worker.flat import trained_parameters
from shoal.serverrun.worker.process import build_worker
from support.models.custom_parts import build_points
from support.paramserver.run_in_process import place_in, recipe_of, run_inside

FEDNOVA = "paramserver.aggregate=fednova"
POINTS = {
    "model": {"build": "support.models.custom_parts:build_centre"},
    "data": {"build": "support.models.custom_parts:build_points"},
    "train": {"steps": 40, "global_batch": 16, "threads": 1, "seed": 3},
    "optim": {"name": "sgd", "lr": 0.2, "schedule": "linear"},
    "checkpoint": {"every": 0},
    "telemetry": {"tensorboard": False},
    "paramserver": {"centers": 1, "aggregate": "fednova", "local_lr": [0.01]},
}


def test_one_step_each_is_plain_averaging(tmp_path):
    plan = "ps=2 workers=2 update=bsp"
    plain = run_inside(tmp_path / "plain", plan, recipe_of())
    found = run_inside(tmp_path / "local", plan, recipe_of(FEDNOVA, "paramserver.local_steps=[1]"))
    assert found.sha256 == plain.sha256


def test_as_many_steps_each_is_the_mean_of_where_they_came(tmp_path):
    recipe = recipe_of(FEDNOVA, "paramserver.local_steps=[2]", "paramserver.local_lr=0.1", "train.steps=3")
    found = run_inside(tmp_path, "ps=2 workers=2 update=bsp", recipe)
    plan = Plan.parse("ps=1 workers=2 update=async")
    worker = build_worker(place_in(tmp_path, "worker", 0, plan, recipe), None)
    parameters = trained_parameters(worker.shares.model.model)
    weights = {name: one.detach().clone() for name, one in parameters.items()}
    for step in range(3):
        ended = []
        for share in range(2):
            with torch.no_grad():
                for name, one in parameters.items():
                    one.copy_(weights[name])
            for part in range(2):
                worker.shares.run(step, share, part=part, num_parts=2)
                with torch.no_grad():
                    for one in parameters.values():
                        one.sub_(0.1 * one.grad)
            ended.append({name: one.detach().clone() for name, one in parameters.items()})
        weights = {name: (ended[0][name] + ended[1][name]) / 2 for name in weights}
    for name, expected in weights.items():
        torch.testing.assert_close(found.weights[name], expected)


@pytest.mark.parametrize("update", ["bsp", "half:2,0", "async"])
def test_unequal_workers_reach_the_mean_of_all_samples(tmp_path, update):
    recipe = recipe_of("paramserver.local_steps=[1, 4]", base=POINTS)
    found = run_inside(tmp_path, f"ps=1 workers=2 update={update}", recipe)
    targets = build_points()["train"].tensors[1]
    distance = torch.linalg.vector_norm(found.weights["point"] - targets.mean(0))
    assert distance < 0.1 * torch.linalg.vector_norm(targets[::2].mean(0) - targets[1::2].mean(0))
