"""Hooks on the steps of several ranks: when each is called, what it is given, and that one which raises ends the run."""

from pathlib import Path

import pytest
import torch

from shoal.core.plan import Plan
from shoal.engine.hooks import Hook
from shoal.launch.failurereport import describe
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from support.processes.supervised_ranks import run

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 16, "sequence": 8, "vocab": 17},
    "train": {"steps": 2, "global_batch": 4},
}
RAISING = """
from shoal.core.errors import RunError
from shoal.engine.hooks import Hook
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.launch.failures import report_failure

class Refusing(Hook):
    def {method}(self, step, *given):
        if rank == 1 and step == 1:
            raise ValueError("this hook has seen enough")

try:
    recipe = Recipe.model_validate({recipe!r})
    model, loss, data = build_parts(recipe)
    with Trainer(model, data, loss=loss, train=recipe.train, rank_status=rank_status, hooks=[Refusing()]) as trainer:
        trainer.train()
except BaseException as error:
    report_failure(run_dir, error, os.environ)
    os._exit(1)
"""


class Record(Hook):
    """Writes down what it is called with, as plain values."""

    def __init__(self):
        self.calls, self.norms, self.actions = [], [], 0

    def on_step_start(self, step, batch):
        self.calls.append(f"start {step}")

    def on_microbatch(self, step, index, loss):
        self.calls.append(f"microbatch {step}.{index}")

    def on_action(self, action, begin, waited, end):
        self.actions += 1

    def on_gradients(self, step, parameters, loss_scale):
        self.calls.append(f"gradients {step}")
        squares = [one.grad.double().square().sum() for one in parameters.values()]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))

    def on_update(self, step, result):
        self.calls.append(f"update {step}")
        assert result.is_taken

    def on_evaluation(self, step, found):
        self.calls.append(f"evaluation {step} {found.split}")

    def on_save(self, step):
        self.calls.append(f"save {step}")

    def on_end(self, step, status):
        self.calls.append(f"end {step} {status}")


def train(world, plan, folder):
    recipe = Recipe.model_validate(RECIPE)
    model, loss, data = build_parts(recipe)
    record = Record()
    chosen = {"plan": Plan.parse(plan), "run_dir": folder, "world": world, "hooks": [record]}
    with Trainer(model, data, loss=loss, train=recipe.train, **chosen) as trainer:
        norms = [done.grad_norm for done in trainer.training_steps()]
    return {"calls": record.calls, "norms": [norms, record.norms], "actions": record.actions}


@pytest.mark.parametrize("plan", ["dp=2 microbatches=2", "pp=2 microbatches=2"])
def test_every_rank_is_called_at_every_point_in_order(tmp_path, plan):
    for found in run_on_ranks(train, 2, plan, str(tmp_path)):
        steps = [
            line
            for step in range(2)
            for line in (
                f"start {step}",
                f"microbatch {step}.0",
                f"microbatch {step}.1",
                f"gradients {step}",
                f"update {step}",
            )
        ]
        assert found["calls"] == [*steps, "save 2", "evaluation 2 validation", "end 2 completed"]
        reported, seen = found["norms"]
        if plan.startswith("dp"):
            assert seen == pytest.approx(reported), "gradients of all replicas, before they are clipped"
        assert (found["actions"] > 0) == plan.startswith("pp")


def test_an_asynchronous_pipeline_calls_them_too(tmp_path):
    for found in run_on_ranks(train, 2, "pp=2 microbatches=2 schedule=pipedream-2bw", str(tmp_path)):
        assert [line for line in found["calls"] if line.startswith(("start", "gradients", "update"))] == [
            f"{point} {step}" for step in range(2) for point in ("start", "gradients", "update")
        ]
        assert found["actions"] == 2 * 2 * 2, "forward and backward of two microbatches, in each of two steps"


@pytest.mark.parametrize(
    "method",
    ["on_gradients", *(pytest.param(point, marks=pytest.mark.soak) for point in ("on_step_start", "on_update"))],
)
def test_a_hook_that_raises_ends_all_ranks_with_its_own_traceback(tmp_path: Path, method):
    outcome = run(tmp_path, RAISING.format(method=method, recipe={**RECIPE, "train": {"steps": 50, "global_batch": 4}}))
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.culprit is not None and outcome.culprit.rank == 1
    text = describe(outcome.culprit, debug=True)
    assert "ValueError: this hook has seen enough" in text
    assert f"in {method}\n" in text, text
