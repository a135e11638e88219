"""``paramserver.aggregate`` in a running job: two workers under bsp, against loops in one process over the same shares."""

import pytest
import torch

from shoal.core.plan import Plan
from shoal.paramserver.server.shard import adasum
from shoal.paramserver.worker.flat import trained_parameters
from shoal.serverrun.worker.process import build_worker
from support.paramserver.run_in_process import place_in, recipe_of, run_inside

STEPS, LR = 4, 0.1


def joined(tmp_path, recipe, join):
    """Weights after plain SGD steps on what ``join`` makes of the two shares' own mean gradients."""
    worker = build_worker(place_in(tmp_path, "worker", 0, Plan.parse("ps=1 workers=2 update=async"), recipe), None)
    parameters = trained_parameters(worker.shares.model.model)
    for step in range(STEPS):
        shares = []
        for share in range(2):
            worker.shares.run(step, share)
            shares.append({name: one.grad.clone() for name, one in parameters.items()})
        with torch.no_grad():
            for name, one in parameters.items():
                one.sub_(LR * join([share[name] for share in shares]))
    return {name: one.detach() for name, one in parameters.items()}


@pytest.mark.parametrize(
    ("aggregate", "join"),
    [
        ("average", lambda parts: sum(parts) / 2),
        ("accumulate", sum),
        ("adasum", lambda parts: adasum([part.flatten() for part in parts]).view(parts[0].shape)),
    ],
)
def test_the_setting_is_what_the_servers_do(tmp_path, aggregate, join):
    recipe = recipe_of(f"paramserver.aggregate={aggregate}", f"train.steps={STEPS}", f"optim.lr={LR}")
    found = run_inside(tmp_path, "ps=2 workers=2 update=bsp", recipe)
    for name, expected in joined(tmp_path, recipe, join).items():
        torch.testing.assert_close(found.weights[name], expected)
