"""L-BFGS over real servers: the path of ``torch.optim.LBFGS``, whoever computes which work unit of the batch."""

import torch

from shoal.trainer.build import build_parts
from support.paramserver.run_in_process import recipe_of, run_inside

STEPS = 8
LOGISTIC = {
    "model": {"build": "support.models.custom_parts:build_logistic"},
    "data": {"source": "digits"},
    "train": {"steps": STEPS, "global_batch": 2000, "threads": 1, "seed": 3, "precision": "float64"},
    "checkpoint": {"every": 0},
    "telemetry": {"tensorboard": False},
    "paramserver": {"centers": 1},
}


def walk_with_torch(recipe, num_iterations):
    """Losses after each iteration, and the weights after the last: a fresh run for each, since a step is all its iterations."""
    losses = []
    for count in range(1, num_iterations + 1):
        model, loss, data = build_parts(recipe)
        model = model.double()
        items = data.train.collate(torch.arange(len(data.train)).numpy())
        inputs, targets = items.inputs[0].double(), items.targets
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=1.0, max_iter=count, max_eval=10_000, history_size=10, line_search_fn="strong_wolfe"
        )

        def closure(model=model, optimizer=optimizer, loss=loss, inputs=inputs, targets=targets):
            optimizer.zero_grad()
            found = loss(model(inputs), targets)
            found.backward()
            return found

        optimizer.step(closure)
        losses.append(float(closure().detach()))
    return losses, {name: one.detach() for name, one in model.named_parameters()}


def test_a_convex_problem_takes_the_path_of_torch(tmp_path):
    recipe = recipe_of(base=LOGISTIC)
    found = run_inside(tmp_path, "ps=2 workers=2 update=lbfgs", recipe)
    losses, weights = walk_with_torch(recipe, STEPS)
    assert [step["step"] for step in found.steps] == list(range(1, STEPS + 1)), "an iteration is a step"
    torch.testing.assert_close([step["loss"] for step in found.steps], losses, rtol=0, atol=1e-6)
    for name, expected in weights.items():
        torch.testing.assert_close(found.weights[name], expected, rtol=0, atol=1e-6)


def test_a_run_that_goes_on_from_its_checkpoint_walks_the_same_path(tmp_path):
    whole = run_inside(tmp_path / "whole", "ps=2 workers=2 update=lbfgs", recipe_of(base=LOGISTIC))
    recipe = recipe_of("train.steps=3", base=LOGISTIC)
    run_inside(tmp_path / "cut", "ps=2 workers=2 update=lbfgs", recipe)
    again = run_inside(tmp_path / "cut", "ps=2 workers=2 update=lbfgs", recipe_of(base=LOGISTIC), resume=True)
    assert [step["step"] for step in again.steps] == list(range(1, STEPS + 1))
    assert again.sha256 == whole.sha256


def test_batches_that_change_from_step_to_step_are_minimised_too(tmp_path):
    recipe = recipe_of("train.global_batch=400", base=LOGISTIC)
    found = run_inside(tmp_path, "ps=1 workers=2 update=lbfgs backup=0", recipe)
    assert found.steps[-1]["loss"] < 0.3 < found.steps[0]["loss"]


def test_what_has_arrived_moves_no_more_and_the_run_still_ends(tmp_path):
    recipe = recipe_of("paramserver.lbfgs_tolerance=10.0", base=LOGISTIC)
    found = run_inside(tmp_path, "ps=2 workers=1 update=lbfgs", recipe)
    model, _, _ = build_parts(recipe)
    assert len(found.steps) == STEPS
    assert all(torch.equal(found.weights[name], one.double()) for name, one in model.named_parameters())
